"""Newton-Schulz: the nearest matrix with equal singular values, approximately, by matrix products alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(matrices: jax.Array, *, steps: int = 5, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """X = M / (|M| + 1e-7), then `steps` times X <- a X + (b A + c A^2) X with A = X X^T (Muon, Jordan et al. 2024).

    The quintic (a, b, c) drives every singular value that is not tiny into about [0.7, 1.2]. A zero matrix stays zero.

    Args:
      matrices: [..., rows, cols]; leading dims are a batch.
      dtype: operands of the products, which accumulate in at least float32, as does the Frobenius norm.

    Returns:
      [..., rows, cols] in the dtype of the input.
    """
    a, b, c = COEFFICIENTS
    wide = jnp.promote_types(dtype, jnp.float32)
    # At default precision a float32 product would be TF32 or one BF16 pass on accelerators.
    precision = jax.lax.Precision.DEFAULT if jnp.dtype(dtype).itemsize < 4 else jax.lax.Precision.HIGHEST
    product = partial(jnp.matmul, preferred_element_type=wide, precision=precision)

    def iterate(_: jax.Array, x: jax.Array) -> jax.Array:
        gram = product(x, jnp.swapaxes(x, -1, -2))
        gram_low = gram.astype(dtype)
        polynomial = b * gram + c * product(gram_low, gram_low)
        return (a * x.astype(wide) + product(polynomial.astype(dtype), x)).astype(dtype)

    m = matrices.astype(jnp.promote_types(matrices.dtype, wide))
    x = (m / (jnp.sqrt(jnp.sum(m * m, axis=(-2, -1), keepdims=True)) + EPS)).astype(dtype)
    tall = matrices.shape[-2] > matrices.shape[-1]  # A is formed on the shorter side
    x = jax.lax.fori_loop(0, steps, iterate, jnp.swapaxes(x, -1, -2) if tall else x)
    return (jnp.swapaxes(x, -1, -2) if tall else x).astype(matrices.dtype)
