"""Root-mean-square normalisation.  Legend: ... any leading dims, C channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The type for statistics, gates, softmax and sums beside activations of `dtype`: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(mean_c x_c^2 + eps) over the last dim (dropped), in at least float32."""
    x = x.astype(wide(x.dtype))
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)


def rms_norm(x: jax.Array, scale_C: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dim; x [..., C] keeps its dtype.

    Statistics in at least float32, one cast, then the weight, as the released code orders it.
    """
    normed = x.astype(wide(x.dtype)) * inverse_rms(x, eps)[..., None]
    return normed.astype(x.dtype) * scale_C.astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, scale_C: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale * sigmoid(gate); x, gate [..., C], in gate's dtype (report eq. 6).

    Weight and gate multiply in at least float32 and the product is cast once, unlike `rms_norm`.
    """
    x_wide = x.astype(wide(gate.dtype))
    normed = x_wide * inverse_rms(x_wide, eps)[..., None] * scale_C.astype(x_wide.dtype)
    return (normed * jax.nn.sigmoid(gate.astype(x_wide.dtype))).astype(gate.dtype)
