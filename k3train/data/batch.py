"""The arrays of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax


class Batch(NamedTuple):
    """B rows of T tokens. The loader fills it with NumPy arrays; a jitted step sees the same fields as JAX arrays.

    Padding has token, target and position 0, segment -1 and loss mask 0.
    """

    tokens: np.ndarray | jax.Array
    """int32 [B, T]: the inputs."""
    targets: np.ndarray | jax.Array
    """int32 [B, T]: the token that follows each input in its document."""
    segment_ids: np.ndarray | jax.Array
    """int32 [B, T]: documents of a row, numbered from 0; -1 is padding."""
    positions: np.ndarray | jax.Array
    """int32 [B, T]: tokens since the start of the document's part in this row."""
    loss_mask: np.ndarray | jax.Array
    """float32 [B, T]: 1 where there is a target, 0 in padding."""
