"""Attention Residuals: every sublayer chooses, per token, among earlier depths (report 2.2, eqs 8-9).

Legend: B batch, T tokens, D model, N sources. A source is what some depth put out; which depths are sources is the business of
`depth.py`.
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
    """Makes a source. Float32, so that its cotangent, a sum over all its later uses, accumulates in float32."""
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
        self.compute = jnp.dtype(config.dtypes.compute)
        self.key_norm = ones((config.d_model,), ("norm",), config)
        self.query = zeros((config.d_model,), ("embed",), config)

    def __call__(self, sources: tuple[Source, ...], last_counts: bool | jax.Array = True) -> tuple[jax.Array, jax.Array]:
        """The mix of the sources [B, T, D] in the compute dtype, and their weights [N, B, T]."""
        dtype = sources[0].value_BTD.dtype
        w_D = self.key_norm[...].astype(dtype) * self.query[...].astype(dtype)
        p_NBT = depth_weights(sources, w_D, last_counts)
        return mix(sources, p_NBT).astype(self.compute), p_NBT
