"""Grouped matmul: each group of consecutive rows times its own matrix, as the experts of a mixture need it.

`grouped_matmul` checks its arguments and chooses the implementation; `reference` is the XLA form that runs everywhere.

Shapes: M rows, K in, N out, E groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.target import target

Implementation = Literal["xla", "hopper", "tpu"]

_DTYPES = ("bfloat16", "float32", "float64")


def grouped_matmul(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """Multiplies each group of consecutive rows by its own matrix: `y_MN[m] = x_MK[m] @ w_EKN[group of m]`.

    The cost follows the rows present, in the backward pass too. The gradients to rows and matrices are the function's
    own; products accumulate in float32 (float64 for float64) at JAX's default matmul precision, so on a GPU float32
    means TF32 unless `jax.default_matmul_precision` says otherwise.

    Args:
        x_MK: bfloat16, float32 or float64 rows, those of group 0 first.
        w_EKN: one matrix per group, in the rows' dtype.
        group_sizes_E: integers >= 0, the rows of each group; their sum is at most M (not checked: they live on the device).
        implementation: None is `hopper` or `tpu` where its kernels apply (`hopper`: JAX 0.11, a Hopper GPU, bf16, M a multiple of 8, K
            and N of 64) and the XLA form elsewhere; the choice is logged once for each reason. By name it raises where it does not
            apply. `tpu` multiplies float32 at the highest precision, or rounded to bfloat16 where the default precision is said
            to be bfloat16; its own function has `out_dtype`.

    Returns:
        y_MN in the rows' dtype. Rows past the sum of the sizes are zero, have zero gradient and enter no matrix's gradient.

    Raises:
        ValueError: a shape does not fit, or the implementation is unknown.
        TypeError: the dtypes of rows and matrices differ or are not supported, or the sizes are not integers.
    """
    _validate(x_MK, w_EKN, group_sizes_E)
    compute = _form(implementation, x_MK, w_EKN)
    (M, K), N = x_MK.shape, w_EKN.shape[2]
    if 0 in (M, K, N):
        return jnp.zeros((M, N), x_MK.dtype)
    x_MK, w_EKN, group_sizes_E = _vary_together(x_MK, w_EKN, group_sizes_E.astype(jnp.int32))
    return compute(x_MK, w_EKN, group_sizes_E)


def _validate(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> None:
    if x_MK.ndim != 2 or w_EKN.ndim != 3 or group_sizes_E.ndim != 1:
        ranks = f"{x_MK.shape}, {w_EKN.shape} and {group_sizes_E.shape}"
        raise ValueError(f"grouped_matmul takes rows [M, K], matrices [E, K, N] and group sizes [E], not arrays of shapes {ranks}.")
    if x_MK.shape[1] != w_EKN.shape[1]:
        raise ValueError(f"grouped_matmul: rows are {x_MK.shape[1]} wide, but the matrices of shape {w_EKN.shape} take {w_EKN.shape[1]}.")
    if group_sizes_E.shape[0] != w_EKN.shape[0] or w_EKN.shape[0] == 0:
        counts = f"{group_sizes_E.shape[0]} sizes, {w_EKN.shape[0]} matrices"
        raise ValueError(f"grouped_matmul needs one group size per matrix, and at least one: {counts}.")
    if x_MK.dtype != w_EKN.dtype or x_MK.dtype.name not in _DTYPES:
        dtypes = f"not {x_MK.dtype} and {w_EKN.dtype}"
        raise TypeError(f"grouped_matmul takes rows and matrices of one dtype among {', '.join(_DTYPES)}, {dtypes}.")
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise TypeError(f"grouped_matmul: group sizes are integers, not {group_sizes_E.dtype}.")


def choose(x_MK: jax.Array, w_EKN: jax.Array) -> tuple[Implementation, str]:
    """The implementation for these arrays (only shapes and dtypes are read) on what is compiled for, and why."""
    platform = target().platform
    if platform == "tpu":
        refusal = _refusal("tpu", x_MK, w_EKN)
        return ("xla", refusal) if refusal else ("tpu", "it is compiled for TPUs")
    if platform == "gpu":
        refusal = _refusal("hopper", x_MK, w_EKN)
        return ("xla", refusal) if refusal else ("hopper", "it is a Hopper GPU and the kernels take these arrays")
    return "xla", "the kernels are for GPUs and TPUs"


def _refusal(implementation: str, x_MK: jax.Array, w_EKN: jax.Array) -> str | None:
    """Why an implementation other than `xla` does not apply, or None. Imports where they are used: they cost 0.4 s, and JAX 0.11."""
    if implementation == "tpu":
        from pallas_kernels.grouped_matmul import tpu

        return tpu.refusal(x_MK, w_EKN)
    from pallas_kernels.grouped_matmul import hopper

    return hopper.platform_refusal() or hopper.shape_refusal(x_MK, w_EKN)


def _form(implementation: str | None, x_MK: jax.Array, w_EKN: jax.Array) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The form to run: the one asked for, else the one that `choose` names, which is logged."""
    if implementation is None:
        implementation, reason = choose(x_MK, w_EKN)
        _log_once(target().platform, implementation, reason)
    if implementation == "xla":
        return reference.grouped_matmul
    if implementation not in ("hopper", "tpu"):
        raise ValueError(f"grouped_matmul: implementation {implementation!r} is none of xla, hopper, tpu.")
    refusal = _refusal(implementation, x_MK, w_EKN)
    if refusal:
        raise ValueError(f"grouped_matmul: implementation {implementation!r} does not apply: {refusal}.")
    if implementation == "tpu":
        from pallas_kernels.grouped_matmul import tpu as kernels
    else:
        from pallas_kernels.grouped_matmul import hopper as kernels
    return kernels.grouped_matmul


@functools.cache
def _log_once(platform: str, implementation: str, reason: str) -> None:
    level = logging.WARNING if implementation == "xla" and platform != "cpu" else logging.INFO
    logging.getLogger(__name__).log(level, "grouped_matmul on %s: %s, since %s", platform, implementation, reason)


def _vary_together(*arrays: jax.Array) -> list[jax.Array]:
    """Inside `shard_map`: arrays that vary over the union of their mesh axes, so that a replicated one gets its gradient summed."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    union = frozenset().union(*varying)
    return [jax.lax.pcast(a, tuple(sorted(union - v)), to="varying") for a, v in zip(arrays, varying, strict=True)]
