"""Batched matmuls at a named precision, with the operand order that the platform runs fastest.

Leading dims are batch; I, J, K are the rows, columns and contracted dim of one product.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


class MatmulStyle(NamedTuple):
    """How products are computed.

    `transpose_first`: a transposed left operand is written out before the product. On CPUs a small batched product takes
    twice as long as both steps; on accelerators the copy would be a waste.
    """

    precision: jax.lax.Precision
    transpose_first: bool

    def at_highest(self) -> MatmulStyle:
        """The same order, in full float32."""
        return self._replace(precision=HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(style: MatmulStyle, a_IK: jax.Array, b_KJ: jax.Array) -> jax.Array:
    """Product a b."""
    return jnp.matmul(a_IK, b_KJ, precision=style.precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_nt(style: MatmulStyle, a_IK: jax.Array, b_JK: jax.Array) -> jax.Array:
    """Product a b^T."""
    return jnp.einsum("...ik,...jk->...ij", a_IK, b_JK, precision=style.precision)


def matmul_tn(style: MatmulStyle, a_KI: jax.Array, b_KJ: jax.Array) -> jax.Array:
    """Product a^T b."""
    if style.transpose_first:
        return matmul(style, transposed(style, a_KI), b_KJ)
    return jnp.einsum("...ki,...kj->...ij", a_KI, b_KJ, precision=style.precision)


def transposed(style: MatmulStyle, x_IJ: jax.Array) -> jax.Array:
    """x^T, written out where the platform runs plain products faster."""
    x_JI = jnp.swapaxes(x_IJ, -1, -2)
    return jax.lax.optimization_barrier(x_JI) if style.transpose_first else x_JI


def _keep(style: MatmulStyle, a: jax.Array, b: jax.Array, *, product) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(style, a, b), (a, b)


def _matmul_backward(style: MatmulStyle, operands: tuple[jax.Array, jax.Array], d_IJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_IK, b_KJ = operands
    return matmul_nt(style, d_IJ, b_KJ), matmul_tn(style, a_IK, d_IJ)


def _matmul_nt_backward(style: MatmulStyle, operands: tuple[jax.Array, jax.Array], d_IJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_IK, b_JK = operands
    return matmul(style, d_IJ, b_JK), matmul_tn(style, d_IJ, a_IK)


matmul.defvjp(partial(_keep, product=matmul), _matmul_backward)
matmul_nt.defvjp(partial(_keep, product=matmul_nt), _matmul_nt_backward)
