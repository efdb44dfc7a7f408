"""The grouped matmul's gradient to the matrices on TPU: every group's rows of x and dy contracted.

Shapes: M rows, K and N the matrices' sides, E groups, V visits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu_rows import precision, result
from pallas_kernels.grouped_matmul.tpu_tiles import PART, WeightsTiles, chip, choose_weights_tiles, for_chunks, list_visits


def _kernel(group_V, tile_V, start_G1, last_2, x_MK, dy_MN, dw_KN, *own_sum_KN, tiles):
    """Without a sum of its own it adds in the result, which stays in VMEM as long as its group does."""
    del last_2
    sum_KN = own_sum_KN[0] if own_sum_KN else dw_KN
    visit, visits = pl.program_id(2), pl.num_programs(2)
    group, first = group_V[visit], tile_V[visit] * tiles.rows
    start, end = start_G1[group] - first, start_G1[group + 1] - first
    is_whole = (start <= 0) & (end >= tiles.rows)

    @pl.when((visit == 0) | (group_V[jnp.maximum(visit - 1, 0)] != group))
    def _():
        sum_KN[...] = jnp.zeros_like(sum_KN)

    def add(rows, low=None):
        def mine(array):
            """Zeros for rows that are not the group's, which may hold NaN."""
            if low is None:
                return array
            row = low + lax.broadcasted_iota(jnp.int32, array.shape, 0)
            return jnp.where((row >= start) & (row < end), array.astype(jnp.float32), 0).astype(array.dtype)

        def one_chunk(features):
            x, dy = mine(x_MK[rows, features]), mine(dy_MN[rows, :])
            sum_KN[features, :] += lax.dot_general(
                x, dy, (((0,), (0,)), ((), ())), precision=precision(x), preferred_element_type=jnp.float32
            )

        for_chunks(tiles.k, one_chunk)

    @pl.when(is_whole)
    def _():
        add(slice(None))

    @pl.when(~is_whole & (end > start))
    def _():
        @pl.loop(jnp.maximum(start, 0) // PART, pl.cdiv(jnp.minimum(end, tiles.rows), PART))
        def _(part):
            low = pl.multiple_of(part * PART, PART)
            add(pl.ds(low, PART), low)

    if own_sum_KN:

        @pl.when((visit == visits - 1) | (group_V[jnp.minimum(visit + 1, visits - 1)] != group))
        def _():
            dw_KN[...] = sum_KN[...].astype(dw_KN.dtype)


def weights_gradient(
    x_MK: jax.Array,
    dy_MN: jax.Array,
    group_sizes_E: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
    tiles: WeightsTiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """`x^T dy` of each group.

    Args:
      x_MK: rows sorted by group, bfloat16 or float32.
      dy_MN: the same rows' cotangents, in the same dtype.
      group_sizes_E: int32, their sum at most M.
      out_dtype: of the result, bfloat16 or float32; the rows' if None.
      tiles: sizes of the tiles; chosen to fit if None.
      interpret: run on the CPU.

    Returns:
      dw_EKN, summed in float32 and rounded once to `out_dtype`; zeros for an empty group.
    """
    (M, K), N, E = x_MK.shape, dy_MN.shape[1], group_sizes_E.shape[0]
    device, out_dtype = chip(), jnp.dtype(out_dtype or x_MK.dtype)
    tiles = tiles or choose_weights_tiles(M, K, N, x_MK.dtype.itemsize, device)
    m, k, n = tiles
    visits = list_visits(group_sizes_E, M, m, for_rows=False)
    across_k, across_n, size = pl.cdiv(K, k), pl.cdiv(N, n), x_MK.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles),
        out_shape=result((E, K, N), out_dtype, x_MK),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(across_k, across_n, visits.count),
            in_specs=[
                pl.BlockSpec((m, k), lambda i, j, visit, group_V, tile_V, start_G1, last_2: (tile_V[visit], i)),
                pl.BlockSpec((m, n), lambda i, j, visit, group_V, tile_V, start_G1, last_2: (tile_V[visit], j)),
            ],
            out_specs=pl.BlockSpec((None, k, n), lambda i, j, visit, group_V, tile_V, start_G1, last_2: (group_V[visit], i, j)),
            scratch_shapes=[] if out_dtype == jnp.float32 else [pltpu.VMEM((k, n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=device.limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * K * N,
            bytes_accessed=size * (M * K * across_n + M * N * across_k) + out_dtype.itemsize * E * K * N,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_matmul_weights",
    )(*visits[:4], x_MK, dy_MN)
