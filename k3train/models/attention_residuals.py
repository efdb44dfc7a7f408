"""Block Attention Residuals: every sublayer chooses, per token, among earlier depths (report 2.2, eqs 8-10).

Legend: B batch, T tokens, D model, N completed blocks. A source is a depth's output; the last source of a mix is the
running sum of the block under way.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.norms import inverse_rms, wide
from k3train.models.parameters import ones, zeros


class Source(NamedTuple):
    """A depth's output with the inverse of its root mean square, both in at least float32."""

    value_BTD: jax.Array
    inverse_rms_BT: jax.Array


def source(value_BTD: jax.Array, eps: float) -> Source:
    """Makes a source. Float32, so that the cotangent of a block, a sum over all its later uses, accumulates in float32."""
    value_BTD = value_BTD.astype(wide(value_BTD.dtype))
    return Source(value_BTD, inverse_rms(value_BTD, eps))


def depth_weights(sources: tuple[Source, ...], w_D: jax.Array, last_counts: bool | jax.Array = True) -> jax.Array:
    """p = softmax_i(sum_c v_ic / rms(v_i) * w_c), in at least float32; [sources, B, T] (report eq. 8).

    `last_counts` False gives the last source no weight; it may be traced, so that a scan over layers stays uniform.
    """
    # a sum of products, not a matmul: exact float32 on every platform
    scores_NBT = jnp.stack([jnp.sum(value_BTD * w_D, axis=-1) * inverse_rms_BT for value_BTD, inverse_rms_BT in sources])
    last_score = jnp.where(last_counts, scores_NBT[-1], -jnp.inf)
    return jax.nn.softmax(scores_NBT.at[-1].set(last_score), axis=0)


def mix(sources: tuple[Source, ...], p_NBT: jax.Array) -> jax.Array:
    """sum_i p_i v_i over the raw sources; [B, T, D] (report eq. 9)."""
    mixed_BTD = p_NBT[0][..., None] * sources[0].value_BTD
    for p_BT, (value_BTD, _) in zip(p_NBT[1:], sources[1:], strict=True):
        mixed_BTD += p_BT[..., None] * value_BTD
    return mixed_BTD


class AttentionResidual(nnx.Module):
    """One mixing site: a pseudo-query, zero at the start so that mixing begins as the mean, and a key norm's weight."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.key_norm = ones((config.d_model,), ("norm",), config)
        self.query = zeros((config.d_model,), ("embed",), config)

    def __call__(self, blocks: tuple[Source, ...], running_BTD: jax.Array, running_counts: bool | jax.Array = True) -> jax.Array:
        """Mixes completed blocks and the running sum; [B, T, D] in the running sum's dtype."""
        dtype = wide(running_BTD.dtype)
        w_D = self.key_norm[...].astype(dtype) * self.query[...].astype(dtype)
        sources = (*blocks, source(running_BTD, self.config.norm_eps))
        return mix(sources, depth_weights(sources, w_D, running_counts)).astype(running_BTD.dtype)
