"""Rows times their group's matrix on Hopper: the forward grouped matmul and its gradient to rows.

Both are one Mosaic GPU kernel. It computes the transposed tile, features x rows, so that the rows of a group lie on
wgmma's N, which comes in steps of 8, and not on M, which comes in steps of 64: a group's ragged end costs less than
`unit` rows. Two consumer warpgroups own 64 features each, a third one feeds them through a ring of TMA copies that
runs on from tile to tile. Which rows a tile has follows from the group sizes on the device: each warpgroup walks through
them by itself, or, where there are many groups, reads a list that XLA makes (`row_tiles`).

Shapes: M rows, E groups, C contracted width, F produced features (forward: C=K, F=N; gradient to rows: C=N, F=K).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper_blocks import (
    ALIGN,
    CONSUMERS,
    WG_FEATURES,
    blocks,
    multiply_steps,
    released_barrier,
    store_unswizzled,
    tiled,
    vary_like,
)

TILE_F = WG_FEATURES * CONSUMERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Tiling of the rows kernel.

    A group is cut into tiles of at most `max_rows`, as even as multiples of `unit` allow; each such multiple has its
    own code. `stages` is the depth of the ring that loads fill, `slots` the number of buffers (of `unit` rows) that stores use.
    Up to `walked` groups, warpgroups walk through the sizes: the list costs 10 us before the kernel starts, a group tens of ns.

    Raises:
      ValueError: `unit`, or how many of them a tile has, is not a power of two.
    """

    max_rows: int = 256
    unit: int = 32
    block_c: int = 64
    stages: int = 4
    slots: int = 2
    walked: int = 256
    num_sms: int = 132

    def __post_init__(self):
        """Checks the sizes by which the kernel divides."""
        most_units = self.max_rows // self.unit
        if self.max_rows % self.unit or self.unit & (self.unit - 1) or most_units & (most_units - 1):
            raise ValueError(f"unit {self.unit} and max_rows / unit {self.max_rows / self.unit:g} must be powers of two")


def tiles_of(start: jax.Array, size: jax.Array, config: RowsConfig) -> jax.Array:
    """The row tiles of a group; a group's first tile begins at a multiple of `ALIGN` rows."""
    return _divide_up(_divide_up(size + _head(start, size), config.unit), config.max_rows // config.unit)


def cut(start: jax.Array, size: jax.Array, index: jax.Array, config: RowsConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first row, first stored row, end of the stored rows) of tile `index` of a group, the latter two counted from the first row."""
    head = _head(start, size)
    units, tiles = _divide_up(size + head, config.unit), jnp.maximum(tiles_of(start, size, config), 1)
    small = lax.div(units, tiles)
    larger = units - small * tiles
    first = (index * small + jnp.minimum(index, larger)) * config.unit
    end = jnp.minimum((small + (index < larger)) * config.unit, size + head - first)
    return start - head + first, jnp.where(index == 0, head, 0), end


def _head(start: jax.Array, size: jax.Array) -> jax.Array:
    return jnp.where(size > 0, jnp.bitwise_and(start, jnp.int32(ALIGN - 1)), 0)


def _divide_up(number: jax.Array, power: int) -> jax.Array:
    """Upwards, by a power of two: a shift, as a division that minds signs takes three times as long in the walk."""
    return lax.shift_right_logical(number + (power - 1), jnp.int32(power.bit_length() - 1))


def row_tiles(group_sizes_E: jax.Array, num_rows: int, config: RowsConfig) -> tuple[jax.Array, jax.Array]:
    """Cuts every group into row tiles.

    A tiled TMA box starts at a multiple of `ALIGN` rows, so a group's first tile may begin with rows of the group
    before it, which are not stored. Rows past the sum of the sizes form one more group, number E, whose tiles the
    kernel fills with zeros.

    Returns:
      (tiles [T, 4] int32 of (group, first row, first stored row, end of the stored rows), the latter two counted from
      the first row; count [1] int32 of the tiles in use). T is a static bound.
    """
    num_groups = group_sizes_E.shape[0] + 1
    groups = jnp.arange(num_groups)
    before = groups[:, None] > groups[None, :]
    # Sums under comparisons instead of cumsum and searchsorted: XLA makes a few small fusions of the whole table.
    sizes = jnp.pad(group_sizes_E.astype(jnp.int32), (0, 1))
    starts = jnp.sum(jnp.where(before, sizes[None, :], 0), axis=1, dtype=jnp.int32)
    sizes = jnp.where(groups == num_groups - 1, num_rows - starts, sizes)
    num_tiles = tiles_of(starts, sizes, config)
    ends = jnp.sum(jnp.where(before | (groups[:, None] == groups[None, :]), num_tiles[None, :], 0), axis=1, dtype=jnp.int32)
    slots = jnp.arange(num_rows // config.max_rows + num_groups + pl.cdiv(num_groups * ALIGN, config.max_rows) + 1, dtype=jnp.int32)
    past_TE = ends[None, :] <= slots[:, None]
    here_TE = ~past_TE & (ends - num_tiles <= slots[:, None])

    def total(mask_TE: jax.Array, values_E: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask_TE, values_E, 0), axis=1, dtype=jnp.int32)

    group, index = total(past_TE, jnp.ones_like(sizes)), slots - total(past_TE, num_tiles)
    return jnp.stack([group, *cut(total(here_TE, starts), total(here_TE, sizes), index, config)], axis=1), ends[-1:]


def _kernel(sizes_E, tiles_T4, count_1, x_MC, w_E, y_MF, x_smem, w_smem, y_smem, ragged_smem, full, empty, *, config, transpose_w):
    (num_rows, contracted), features, num_groups = x_MC.shape, y_MF.shape[1], sizes_E.shape[0]
    steps, feature_tiles = pl.cdiv(contracted, config.block_c), pl.cdiv(features, TILE_F)
    stages, unit = jnp.int32(config.stages), config.unit
    worker, wg = lax.axis_index("worker"), lax.axis_index("wg")

    def locate(local):
        """(row tile, feature tile) of this block's tile `local`."""
        linear = local * config.num_sms + worker
        return lax.div(linear, jnp.int32(feature_tiles)), lax.rem(linear, jnp.int32(feature_tiles))

    def listed(local, at):
        """Tile `local` from the list: ((group, first row, first stored, end of stored, feature tile), is there one, where to go on)."""
        tile, feature_tile = locate(local)
        last = jnp.maximum(count_1[0] - 1, 0)
        return (*(tiles_T4[jnp.minimum(tile, last), i] for i in range(4)), feature_tile), tile < count_1[0], at

    def size_of(group):
        return sizes_E[jnp.minimum(group, num_groups - 1)]  # loaded while the group before it is looked at

    def walked(local, at):
        """The same, from group, its start, the tiles before it, those before the next, its size, the next's: on to the tile's group."""
        tile, feature_tile = locate(local)

        def is_before(at):
            group, _, _, end_tile, _, _ = at
            return (group < num_groups) & (end_tile <= tile)

        def next_group(at):
            group, start, _, end_tile, size, size_after = at
            start, group = start + size, group + 1
            size = jnp.where(group < num_groups, size_after, num_rows - start)
            return group, start, end_tile, end_tile + tiles_of(start, size, config), size, size_of(group + 1)

        at = group, start, before, end_tile, size, _ = lax.while_loop(is_before, next_group, at)
        return (group, *cut(start, size, tile - before, config), feature_tile), tile < end_tile, at

    def for_each_tile(body):
        zero = jnp.int32(0)
        if tiles_T4 is not None:
            find, begin = listed, ()
        else:
            find, begin = walked, (zero, zero, zero, tiles_of(zero, size_of(0), config), size_of(0), size_of(1))

        def step(carry):
            local, done, entry, _, at = carry
            following = find(local + 1, at)  # asked for now, needed after this tile
            group, first, stored, end, feature_tile = entry
            num_steps = jnp.where(group < num_groups, jnp.int32(steps), jnp.int32(0))
            body(group, pl.multiple_of(first, ALIGN), stored, end, feature_tile * TILE_F, num_steps, done)
            return local + 1, done + num_steps, *following

        carry = jnp.int32(0), jnp.int32(0), *find(jnp.int32(0), begin)
        return lax.while_loop(lambda carry: carry[3], step, carry)[1]

    def for_tile_rows(end, body):
        """Runs the body with the tile's rows as a static number: `end` rounded up to whole units."""
        for rows in range(unit, config.max_rows + 1, unit):
            pl.when((end > rows - unit) & (end <= rows))(functools.partial(body, rows))

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(group, first, stored, end, feature, num_steps, done):
            del stored

            @pl.loop(jnp.int32(0), num_steps)
            def _step(step):
                slot = lax.rem(done + step, stages)

                @pl.when(done + step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at_c = pl.ds(step * config.block_c, config.block_c)
                at_f = pl.ds(feature, TILE_F)
                w_tile = w_E.at[group, at_f, at_c] if transpose_w else w_E.at[group, at_c, at_f]
                plgpu.copy_gmem_to_smem(w_tile, w_smem.at[slot], full.at[slot])

                def load_rows(tile_rows):
                    x_tile, buffer = x_MC.at[pl.ds(first, tile_rows), at_c], x_smem.at[slot, pl.ds(0, tile_rows)]
                    plgpu.copy_gmem_to_smem(x_tile, buffer, full.at[slot])

                for_tile_rows(end, load_rows)

        done = for_each_tile(load_tile)

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    @pl.when(wg < CONSUMERS)
    def _consume():
        plgpu.set_max_registers(232, action="increase")
        at_wg = pl.ds(wg * WG_FEATURES, WG_FEATURES)

        def compute(first, stored, end, feature, num_steps, done, tile_rows):
            def operands(step, slot):
                del step
                w_tile = w_smem.at[slot, at_wg] if transpose_w else w_smem.at[slot, :, at_wg].transpose((1, 0))
                return w_tile, x_smem.at[slot, pl.ds(0, tile_rows)].transpose((1, 0))

            def accumulate(acc):
                return multiply_steps(acc, num_steps, done, stages, full, empty, operands)

            value = pl.run_scoped(accumulate, plgpu.ACC((WG_FEATURES, tile_rows), jnp.float32)).astype(y_MF.dtype)
            at_f = pl.ds(feature + wg * WG_FEATURES, WG_FEATURES)

            def store(index):
                buffer = y_smem.at[wg, index % config.slots]
                plgpu.wait_smem_to_gmem(config.slots - 1, wait_read_only=True)
                buffer.transpose((1, 0))[...] = value[:, index * unit : (index + 1) * unit]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, y_MF.at[pl.ds(first + index * unit, unit), at_f])

            def store_ragged(index, begin, left):
                """Rows [begin, begin + left) of the tile, all within one unit, in powers of two: TMA boxes are static."""
                buffer = ragged_smem.at[wg]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_unswizzled(buffer.transpose((1, 0)), value[:, index * unit : (index + 1) * unit])
                plgpu.commit_smem()
                size = unit // 2
                while size:

                    @pl.when(jnp.bitwise_and(left, jnp.int32(size)) != 0)
                    def _(size=size):
                        row = begin + jnp.bitwise_and(left, jnp.int32(-2 * size))
                        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(row - index * unit, size)], y_MF.at[pl.ds(first + row, size), at_f])

                    size //= 2

            @pl.when(feature + wg * WG_FEATURES < features)  # a box of one row beyond the edge would reach the next row
            def _store():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                last = tile_rows // unit - 1
                for index in range(last + 1):
                    if 0 < index < last:
                        store(index)
                        continue
                    begin = stored if index == 0 else jnp.int32(index * unit)
                    left = jnp.minimum(end, (index + 1) * unit) - begin
                    pl.when(left == unit)(functools.partial(store, index))
                    pl.when((left > 0) & (left < unit))(functools.partial(store_ragged, index, begin, left))

        def compute_tile(group, first, stored, end, feature, num_steps, done):
            del group
            for_tile_rows(end, functools.partial(compute, first, stored, end, feature, num_steps, done))

        for_each_tile(compute_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("transpose_w", "config", "interpret"))  # lowered once for all the layers that call it
def rows_matmul(
    x_MC: jax.Array,
    w_E: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_w: bool = False,
    config: RowsConfig | None = None,
    interpret=None,
) -> jax.Array:
    """Multiplies each group's rows with its matrix; rows past the sum of the sizes give zeros.

    Args:
      x_MC: rows sorted by group, bfloat16; M a multiple of 8, C of 64.
      w_E: [E, C, F], or [E, F, C] with `transpose_w`; same dtype, F a multiple of 64.
      group_sizes_E: integers, at least 0, with a sum of at most M.
      transpose_w: contract the last dimension of `w_E` (the gradient to rows) and not the middle one.

    Returns:
      y_MF in x's dtype, accumulated in FP32.
    """
    config = config or RowsConfig()
    num_rows = x_MC.shape[0]
    num_groups, features = w_E.shape[0], w_E.shape[1 if transpose_w else 2]
    dtype, w_tile = x_MC.dtype, (TILE_F, config.block_c) if transpose_w else (config.block_c, TILE_F)
    sizes_E = group_sizes_E.astype(jnp.int32)
    tables = row_tiles(sizes_E, num_rows, config) if num_groups > config.walked else ()

    def body(*refs, **scratch):
        sizes_ref, *tables_refs, x_ref, w_ref, y_ref = refs
        first_ref, second_ref = tables_refs or (None, None)
        _kernel(sizes_ref, first_ref, second_ref, x_ref, w_ref, y_ref, **scratch, config=config, transpose_w=transpose_w)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, features), dtype),
        scratch_types=dict(
            x_smem=tiled((config.stages, config.max_rows, config.block_c), dtype),
            w_smem=tiled((config.stages, *w_tile), dtype),
            y_smem=tiled((CONSUMERS, config.slots, config.unit, WG_FEATURES), dtype),
            ragged_smem=plgpu.SMEM((CONSUMERS, config.unit, WG_FEATURES), dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
            empty=released_barrier(config.stages),
        ),
        **blocks(config.num_sms),
        kernel_name="grouped_matmul_grad_rows" if transpose_w else "grouped_matmul_forward",
        interpret=interpret,
    )
    return vary_like(kernel(sizes_E, *tables, x_MC, w_E), x_MC)
