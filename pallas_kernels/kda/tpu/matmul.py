"""Matrix products inside the TPU kernels: one BF16 pass, three, or full float32, each with its gradient in the same arithmetic.

I, J, K are the rows, columns and contracted dim of one product. All results are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

# "bf16": operands rounded to bf16. "split": operands in two bf16 parts, about 16 bits: three passes, or two where the left operand is
# bf16 itself. "f32": the matmul unit's six passes.
Passes = Literal["bf16", "split", "f32"]
Dims = tuple[tuple[int, ...], tuple[int, ...]]

_NN, _NT, _TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as the sum of two bf16 arrays, exact to about 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _dot(dims: Dims, passes: Passes, a: jax.Array, b: jax.Array) -> jax.Array:
    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST if passes == "f32" else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    if passes == "f32":
        return dot(a, b)
    if passes == "bf16":
        return dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
    b_high, b_low = parts(b)
    if a.dtype == jnp.bfloat16:
        return dot(a, b_high) + dot(a, b_low)
    a_high, a_low = parts(a)
    return dot(a_high, b_high) + (dot(a_high, b_low) + dot(a_low, b_high))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(passes: Passes, a_IK: jax.Array, b_KJ: jax.Array) -> jax.Array:
    """Product a b."""
    return _dot(_NN, passes, a_IK, b_KJ)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_nt(passes: Passes, a_IK: jax.Array, b_JK: jax.Array) -> jax.Array:
    """Product a b^T."""
    return _dot(_NT, passes, a_IK, b_JK)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_tn(passes: Passes, a_KI: jax.Array, b_KJ: jax.Array) -> jax.Array:
    """Product a^T b."""
    return _dot(_TN, passes, a_KI, b_KJ)


def _keep(passes: Passes, a: jax.Array, b: jax.Array, *, product: Callable[..., jax.Array]):
    return product(passes, a, b), (a, b)


def _matmul_backward(passes: Passes, operands: tuple[jax.Array, jax.Array], d_IJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_IK, b_KJ = operands
    return matmul_nt(passes, d_IJ, b_KJ), matmul_tn(passes, a_IK, d_IJ)


def _matmul_nt_backward(passes: Passes, operands: tuple[jax.Array, jax.Array], d_IJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_IK, b_JK = operands
    return matmul(passes, d_IJ, b_JK), matmul_tn(passes, d_IJ, a_IK)


def _matmul_tn_backward(passes: Passes, operands: tuple[jax.Array, jax.Array], d_IJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_KI, b_KJ = operands
    return matmul_nt(passes, b_KJ, d_IJ), matmul(passes, a_KI, d_IJ)


matmul.defvjp(partial(_keep, product=matmul), _matmul_backward)
matmul_nt.defvjp(partial(_keep, product=matmul_nt), _matmul_nt_backward)
matmul_tn.defvjp(partial(_keep, product=matmul_tn), _matmul_tn_backward)
