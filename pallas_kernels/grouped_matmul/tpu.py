"""The grouped matmul on TPU (Mosaic TPU): one kernel each for rows times matrices and for the gradient to matrices.

This file joins them into one differentiable function and says when it applies. Design and figures: docs/kernels/tpu.md.

Shapes: M rows, E groups, K and N the matrices' sides.
"""

from __future__ import annotations

import functools

import jax
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """Multiplies each group's rows with its matrix; see `pallas_kernels.grouped_matmul.grouped_matmul` for the contract.

    Args:
      x_MK: rows sorted by group, bfloat16 or float32.
      w_EKN: one matrix per group, same dtype.
      group_sizes_E: int32, at least 0, with a sum of at most M.
      interpret: run the kernels on the CPU, for tests.

    Returns:
      y_MN in x's dtype, accumulated in float32; float32 operands are multiplied at the highest precision.
    """
    return rows_matmul(x_MK, w_EKN, group_sizes_E, interpret=interpret)


def _forward(x_MK, w_EKN, group_sizes_E, interpret):
    return rows_matmul(x_MK, w_EKN, group_sizes_E, interpret=interpret), (x_MK, w_EKN, group_sizes_E)


def _backward(interpret, saved, dy_MN):
    x_MK, w_EKN, group_sizes_E = saved
    dx_MK = rows_matmul(dy_MN, w_EKN, group_sizes_E, transpose_w=True, interpret=interpret)
    return dx_MK, weights_gradient(x_MK, dy_MN, group_sizes_E, interpret=interpret), None


grouped_matmul.defvjp(_forward, _backward)
