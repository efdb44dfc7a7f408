"""The grouped matmul on TPU (Mosaic TPU): one kernel each for rows times matrices and for the gradient to matrices.

This file joins them into one differentiable function and says when it applies. Design and figures: docs/kernels/tpu.md.

Shapes: M rows, E groups, K and N the matrices' sides.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.tpu_tiles import SMEM_BYTES, smem_bytes
from pallas_kernels.grouped_matmul.tpu_weights import weights_gradient


def refusal(x_MK: jax.Array, w_EKN: jax.Array) -> str | None:
    """Why the kernels do not take these arrays (only their shapes and dtypes are read), or None."""
    if x_MK.dtype.name not in ("bfloat16", "float32"):
        return f"rows and matrices must be bfloat16 or float32, not {x_MK.dtype}"
    if smem_bytes(x_MK.shape[0], w_EKN.shape[0], x_MK.dtype.itemsize) > SMEM_BYTES:
        return f"the list of tiles of {x_MK.shape[0]} rows in {w_EKN.shape[0]} groups does not fit scalar memory"
    return None


def grouped_matmul(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    group_sizes_E: jax.Array,
    interpret: bool | pltpu.InterpretParams = False,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Multiplies each group's rows with its matrix; see `pallas_kernels.grouped_matmul.grouped_matmul` for the contract.

    Float32 rows and matrices are multiplied at the highest precision, unless `jax.default_matmul_precision` says bfloat16: then they
    and the cotangents are rounded to bfloat16 and multiplied in one pass, and results and gradients are the float32 sums.

    Args:
      x_MK: rows sorted by group, bfloat16 or float32.
      w_EKN: one matrix per group, same dtype.
      group_sizes_E: int32, at least 0, with a sum of at most M.
      interpret: run the kernels on the CPU, for tests.
      out_dtype: of the result, bfloat16 or float32; x's if None. With bfloat16 rows and matrices a float32 result is the sum as it
        is; its cotangent is rounded to bfloat16, and the gradients are bfloat16 like what they belong to.

    Returns:
      y_MN in `out_dtype`, accumulated in float32.
    """
    is_rounded = x_MK.dtype == jnp.float32 and jax.config.jax_default_matmul_precision in _BFLOAT16_PRODUCTS
    dtypes = _Dtypes(jnp.dtype(jnp.bfloat16) if is_rounded else x_MK.dtype, jnp.dtype(out_dtype or x_MK.dtype), x_MK.dtype)
    return _multiply(x_MK, w_EKN, group_sizes_E, dtypes, interpret)


_BFLOAT16_PRODUCTS = ("default", "bfloat16", "BF16_BF16_F32")  # the default of JAX on TPU, by its three names


class _Dtypes(NamedTuple):
    operands: jnp.dtype
    """Of what is multiplied, cotangents too."""
    result: jnp.dtype
    gradients: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(x_MK, w_EKN, group_sizes_E, dtypes, interpret):
    return _forward(x_MK, w_EKN, group_sizes_E, dtypes, interpret)[0]


def _forward(x_MK, w_EKN, group_sizes_E, dtypes, interpret):
    x_MK, w_EKN = x_MK.astype(dtypes.operands), w_EKN.astype(dtypes.operands)
    y_MN = rows_matmul(x_MK, w_EKN, group_sizes_E, out_dtype=dtypes.result, interpret=interpret)
    return y_MN, (x_MK, w_EKN, group_sizes_E)


def _backward(dtypes, interpret, saved, dy_MN):
    (x_MK, w_EKN, group_sizes_E), dy_MN = saved, dy_MN.astype(dtypes.operands)
    dx_MK = rows_matmul(dy_MN, w_EKN, group_sizes_E, transpose_w=True, out_dtype=dtypes.gradients, interpret=interpret)
    return dx_MK, weights_gradient(x_MK, dy_MN, group_sizes_E, out_dtype=dtypes.gradients, interpret=interpret), None


_multiply.defvjp(_forward, _backward)
