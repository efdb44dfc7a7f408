"""The grouped matmul on Hopper GPUs (Mosaic GPU): one kernel each for the product and its two gradients.

`hopper_rows` multiplies rows with their group's matrix (forward and gradient to rows), `hopper_weights` contracts the
rows of each group (gradient to weights). This file joins them into one differentiable function and says when it applies.
Design and measurements: docs/kernels/latent_moe.md.

Shapes: M rows, E groups, K and N the matrices' sides.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.hopper_blocks import ALIGN, WG_FEATURES
from pallas_kernels.grouped_matmul.hopper_rows import rows_matmul
from pallas_kernels.grouped_matmul.hopper_weights import weights_gradient

MIN_JAX = (0, 11)


def shape_refusal(x_MK, w_EKN) -> str | None:
    """Why the kernels do not take these arrays (only their shapes and dtypes are read), or None."""
    if x_MK.dtype != jnp.bfloat16 or w_EKN.dtype != jnp.bfloat16:
        return f"rows and weights must both be bfloat16, not {x_MK.dtype} and {w_EKN.dtype}"
    for name, size, multiple in (("rows", x_MK.shape[0], ALIGN), ("K", w_EKN.shape[1], WG_FEATURES), ("N", w_EKN.shape[2], WG_FEATURES)):
        if size == 0 or size % multiple:
            return f"{name} = {size} is not a positive multiple of {multiple}"
    return None


def platform_refusal() -> str | None:
    """Why the kernels do not run in this process, or None."""
    if jax.__version_info__[:2] < MIN_JAX:
        return f"JAX {jax.__version__} is older than {'.'.join(map(str, MIN_JAX))}"
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    return None if capability == "9.0" else f"the GPU's compute capability is {capability}, not 9.0"


@jax.custom_vjp
def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Multiplies each group's rows with its matrix; see `pallas_kernels.grouped_matmul.grouped_matmul` for the contract.

    Args:
      x_MK: rows sorted by group, bfloat16; M a multiple of 8, K of 64.
      w_EKN: one matrix per group, same dtype; N a multiple of 64.
      group_sizes_E: integers, at least 0, with a sum of at most M.

    Returns:
      y_MN in x's dtype, accumulated in FP32. Rows past the sum of the sizes are zeros, in gradients too.
    """
    return rows_matmul(x_MK, w_EKN, group_sizes_E)


def _forward(x_MK, w_EKN, group_sizes_E):
    return rows_matmul(x_MK, w_EKN, group_sizes_E), (x_MK, w_EKN, group_sizes_E)


def _backward(saved, dy_MN):
    x_MK, w_EKN, group_sizes_E = saved
    dx_MK = rows_matmul(dy_MN, w_EKN, group_sizes_E, transpose_w=True)
    dw_EKN = weights_gradient(x_MK, dy_MN, group_sizes_E)
    return dx_MK, dw_EKN, np.zeros(group_sizes_E.shape, jax.dtypes.float0)


grouped_matmul.defvjp(_forward, _backward)
