"""The short causal convolution in front of KDA.  Legend: B batch, T tokens, H heads, K channels, W taps."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def short_conv(x_BTHK: jax.Array, w_HKW: jax.Array, *, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """silu(sum_j w_j x_{t-W+1+j}): one depthwise filter per channel, in x's dtype (report 2.1.1).

    Taps before the start of a token's document count as zero; tokens of segment -1 (padding) give zero.
    """
    width = w_HKW.shape[-1]
    w_HKW = w_HKW.astype(x_BTHK.dtype)
    y_BTHK = x_BTHK * w_HKW[..., width - 1]
    for back in range(1, min(width, x_BTHK.shape[1])):
        past_BTHK = jnp.pad(x_BTHK[:, :-back], ((0, 0), (back, 0), (0, 0), (0, 0)))
        if segment_ids_BT is not None:
            same_BT = segment_ids_BT[:, back:] == segment_ids_BT[:, :-back]
            past_BTHK *= jnp.pad(same_BT, ((0, 0), (back, 0)))[..., None, None].astype(x_BTHK.dtype)
        y_BTHK += past_BTHK * w_HKW[..., width - 1 - back]
    y_BTHK = jax.nn.silu(y_BTHK)
    return y_BTHK if segment_ids_BT is None else y_BTHK * (segment_ids_BT >= 0)[..., None, None].astype(y_BTHK.dtype)
