"""Next-token cross-entropy as a sum and a count, so that microbatches and shards combine exactly.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def cross_entropy(logits_BTV: Array, targets_BT: Array, loss_mask_BT: Array) -> tuple[jax.Array, jax.Array]:
    """The summed negative log-likelihood of the real targets, in nats, and their number.

    Args:
      logits_BTV: any float type; evaluated in at least float32.
      targets_BT: int32; the value where the mask is 0 is not looked at, but must lie in [0, V).
      loss_mask_BT: 1 for a real target, 0 for none.

    Returns:
      two scalars of the evaluation's type; mean loss = total sum / total count over any split of the rows.
    """
    logits_BTV = jnp.asarray(logits_BTV, jnp.promote_types(logits_BTV.dtype, jnp.float32))
    # A masked sum picks the target's logit: its gradient is a select, where that of a gather is a scatter.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype)
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    mask_BT = loss_mask_BT.astype(nats_BT.dtype)
    return jnp.sum(nats_BT * mask_BT), jnp.sum(mask_BT)
