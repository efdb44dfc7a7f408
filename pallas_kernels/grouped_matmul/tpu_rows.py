"""Rows times their group's matrix on TPU: the forward grouped matmul and its gradient to rows.

One visit multiplies the rows that a group has in a tile. Consecutive visits of one tile, or of one matrix, find it in VMEM.

Shapes: M rows, E groups, V visits, C contracted width, F produced features (forward: C=K, F=N; gradient to rows: C=N, F=K).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu_tiles import PART, RowsTiles, chip, choose_rows_tiles, for_chunks, list_visits


def _kernel(group_V, tile_V, start_G1, last_2, x_MC, w_CF, y_MF, *sum_MF, tiles, contracted, num_groups, transpose_w):
    """`last_2` serves the index maps only."""
    visit, step = pl.program_id(1), pl.program_id(2)
    steps, group = pl.cdiv(contracted, tiles.contracted), group_V[visit]
    first = tile_V[visit] * tiles.rows
    start, end = start_G1[group] - first, start_G1[group + 1] - first
    is_past, is_whole = group == num_groups, (start <= 0) & (end >= tiles.rows)

    def within(array, axis):
        """The array with zeros where it lies past the contracted width: memory there may hold NaN."""
        if contracted % tiles.contracted == 0:
            return array
        column = step * tiles.contracted + lax.broadcasted_iota(jnp.int32, array.shape, axis)
        return jnp.where(column < contracted, array.astype(jnp.float32), 0).astype(array.dtype)

    def store(value, at, low):
        if low is not None:  # the rest of these rows is another visit's
            row = low + lax.broadcasted_iota(jnp.int32, value.shape, 0)
            value = jnp.where((row >= start) & (row < end), value, y_MF[at].astype(jnp.float32))
        y_MF[at] = value.astype(y_MF.dtype)

    def multiply(rows, low=None):
        def one_chunk(features):
            x, w = within(x_MC[rows, :], 1), w_CF[features, :] if transpose_w else w_CF[:, features]
            w_axis = 1 if transpose_w else 0
            product = lax.dot_general(
                x, within(w, w_axis), (((1,), (w_axis,)), ((), ())), precision=precision(x), preferred_element_type=jnp.float32
            )
            at = rows, features
            if steps == 1:
                store(product, at, low)
                return
            (total,) = sum_MF

            @pl.when(step == 0)
            def _():
                total[at] = product

            @pl.when(step > 0)
            def _():
                total[at] += product

            @pl.when(step == steps - 1)
            def _():
                store(total[at], at, low)

        for_chunks(tiles.features, one_chunk)

    @pl.when(is_whole & ~is_past)
    def _():
        multiply(slice(None))

    @pl.when(~is_whole & ~is_past)
    def _():
        @pl.loop(jnp.maximum(start, 0) // PART, pl.cdiv(jnp.minimum(end, tiles.rows), PART))
        def _(part):
            low = pl.multiple_of(part * PART, PART)
            multiply(pl.ds(low, PART), low)

    @pl.when(is_past)
    def _():
        store(jnp.zeros(y_MF.shape, jnp.float32), (slice(None), slice(None)), 0)


def precision(x: jax.Array) -> lax.Precision:
    """Float32 operands keep all their bits; stated for bfloat16 too, since JAX's default may be one that is for float32 only."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def result(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """A kernel's result, which inside `shard_map` varies over the mesh axes that an argument varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def rows_matmul(
    x_MC: jax.Array,
    w_E: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_w: bool = False,
    out_dtype: jnp.dtype | None = None,
    tiles: RowsTiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Multiplies each group's rows with its matrix, or with its transpose.

    Args:
      x_MC: rows sorted by group, bfloat16 or float32.
      w_E: matrices [E, C, F], or [E, F, C] with `transpose_w`, in the rows' dtype.
      group_sizes_E: int32, their sum at most M.
      transpose_w: contract the matrices' last axis.
      out_dtype: of the result, bfloat16 or float32; the rows' if None.
      tiles: sizes of the tiles; chosen to fit if None.
      interpret: run on the CPU.

    Returns:
      y_MF, summed in float32 and rounded once to `out_dtype`; zeros in rows past the groups.
    """
    (M, C), E, F = x_MC.shape, w_E.shape[0], w_E.shape[1 if transpose_w else 2]
    device, out_dtype = chip(), jnp.dtype(out_dtype or x_MC.dtype)
    size, out_size = x_MC.dtype.itemsize, out_dtype.itemsize
    tiles = tiles or choose_rows_tiles(M, C, F, size, out_size, device)
    m, c, f = tiles
    steps, feature_tiles = pl.cdiv(C, c), pl.cdiv(F, f)
    visits = list_visits(group_sizes_E, M, m, for_rows=True)

    # Visits of rows past the groups multiply nothing: their operands are those that are there already.
    def contracted_tile(visit, step, group_V):
        return jnp.where(group_V[visit] == E, steps - 1, step) if steps > 1 else 0

    def x_tile(feature, visit, step, group_V, tile_V, start_G1, last_2):
        del feature, start_G1
        return jnp.minimum(tile_V[visit], last_2[1]), contracted_tile(visit, step, group_V)

    def w_tile(feature, visit, step, group_V, tile_V, start_G1, last_2):
        del tile_V, start_G1
        place = contracted_tile(visit, step, group_V), feature
        return jnp.minimum(group_V[visit], last_2[0]), *(place[::-1] if transpose_w else place)

    def y_tile(feature, visit, step, group_V, tile_V, start_G1, last_2):
        del step, group_V, start_G1, last_2
        return tile_V[visit], feature

    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, contracted=C, num_groups=E, transpose_w=transpose_w),
        out_shape=result((M, F), out_dtype, x_MC),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(feature_tiles, visits.count, steps),
            in_specs=[pl.BlockSpec((m, c), x_tile), pl.BlockSpec((None, f, c) if transpose_w else (None, c, f), w_tile)],
            out_specs=pl.BlockSpec((m, f), y_tile),
            scratch_shapes=[pltpu.VMEM((m, f), jnp.float32)] if steps > 1 else [],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=device.limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * C * F, bytes_accessed=size * (M * C * feature_tiles + w_E.size) + out_size * M * F, transcendentals=0
        ),
        interpret=interpret,
        name="grouped_matmul_rows_transposed" if transpose_w else "grouped_matmul_rows",
    )(*visits[:4], x_MC, w_E)
