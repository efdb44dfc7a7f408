"""How the weights kernel's rows are cut: a group is one segment, a group much longer than the others several, joined afterwards.

One group that holds most rows of narrow matrices has too few tiles for 132 SMs. Its segments' sums, in FP32, go to a buffer of partial
sums, which a second kernel adds up in a fixed order; it ends at once where no group was cut.

Shapes: M rows, E groups, K and N the matrices' sides, T segments, P partial sums, B pieces of C elements of a matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper_blocks import ALIGN

PARTIAL_BYTES = 60 * 2**20
_PIECE, _WARPGROUPS = 512, 4  # elements that a warpgroup joins at a time; warpgroups of a block


def segment_rows(rows: int, groups: int, k: int, n: int, tiles: int, num_sms: int) -> int | None:
    """Rows of a segment where cutting may pay, else None; groups of up to 1.5 times as many stay whole.

    Half of what an SM has to do in all, unless groups of the mean size or partial sums beyond `PARTIAL_BYTES` would come of it.
    """
    if tiles >= num_sms:
        return None
    least = max(rows * tiles / num_sms / 2, 2 * rows / groups, 1.5 * rows * k * n * 4 / PARTIAL_BYTES, 256)
    length = -(-int(least) // 64) * 64
    return length if 3 * length < 2 * rows else None


def partial_sums(rows: int, length: int) -> int:
    """P: cut groups have more than 1.5 `length` rows and at most 1.5 segments per `length` rows."""
    return 3 * rows // (2 * length)


def segments(group_sizes_E: jax.Array, length: int | None, partial: int) -> jax.Array:
    """The segments, those of the largest groups first, so that tiles even out over the SMs.

    Sums under comparisons instead of sorts and cumsum: XLA makes two reductions of the whole table.

    Args:
      group_sizes_E: rows of each group.
      length: rows of a segment, a multiple of 64, or None: every group is one.
      partial: P.

    Returns:
      [T, 8] int32 of (group, aligned first row, head, rows with head, segments of the group, 1 if it is cut, rows of all groups, segments
      in use). Segments of cut groups come first, so their partial sums have their numbers.
    """
    sizes = group_sizes_E.astype(jnp.int32)
    is_cut = 2 * sizes > 3 * length if length else jnp.zeros_like(sizes, bool)
    pieces = jnp.where(is_cut, (sizes + (length - 1)) // length, 1) if length else jnp.ones_like(sizes)
    groups = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    # One group more, behind all others and smaller, as what lies before it is the total (G = E + 1).
    groups_G, sizes_G = jnp.arange(sizes.shape[0] + 1, dtype=jnp.int32), jnp.pad(sizes, (0, 1), constant_values=-1)
    before_GE = groups_G[:, None] > groups[None, :]
    larger_GE = (sizes[None, :] > sizes_G[:, None]) | ((sizes[None, :] == sizes_G[:, None]) & before_GE)
    starts_G = jnp.sum(jnp.where(before_GE, sizes[None, :], 0), axis=1, dtype=jnp.int32)
    first_segment_G = jnp.sum(jnp.where(larger_GE, pieces[None, :], 0), axis=1, dtype=jnp.int32)
    starts, first_segment = starts_G[:-1], first_segment_G[:-1]
    indices = jnp.arange(sizes.shape[0] + partial, dtype=jnp.int32)
    here_TE = (first_segment[None, :] <= indices[:, None]) & (indices[:, None] < (first_segment + pieces)[None, :])

    def of_group(values_E: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(here_TE, values_E[None, :], 0), axis=1, dtype=jnp.int32)

    start, size, count, cut = of_group(starts), of_group(sizes), of_group(pieces), of_group(is_cut.astype(jnp.int32))
    each = (size + count * 64 - 1) // jnp.maximum(count * 64, 1) * 64  # as even as multiples of 64 allow
    begin = jnp.where(cut > 0, (indices - of_group(first_segment)) * each, 0)
    rows = jnp.where(cut > 0, jnp.clip(size - begin, 0, each), size)
    heads = jnp.where(size > 0, start % ALIGN, 0)
    totals = (jnp.broadcast_to(total_G[-1], indices.shape) for total_G in (starts_G, first_segment_G))
    return jnp.stack((of_group(groups), start + begin - heads, heads, rows + heads, count, cut, *totals), axis=1)


def _join(segments_T8, partial_PBC, dw_EBC, *, accumulate, num_blocks):
    layout = plgpu.Layout.WG_STRIDED((_PIECE,), vec_size=4)
    worker, workers = lax.axis_index("block") * _WARPGROUPS + lax.axis_index("wg"), num_blocks * _WARPGROUPS
    last, num_pieces = segments_T8.shape[0] - 1, dw_EBC.shape[1]

    def join_group(first):
        group, count = segments_T8[first, 0], segments_T8[first, 4]

        @pl.loop(worker, num_pieces, step=workers)
        def _piece(piece):
            def add(number, total):
                return total + plgpu.load(partial_PBC.at[first + number, piece], layout=layout)

            total = plgpu.layout_cast(jnp.zeros(_PIECE, jnp.float32), layout)
            total = lax.fori_loop(jnp.int32(0), count, add, total)
            if accumulate:
                total = plgpu.load(dw_EBC.at[group, piece], layout=layout) + total
            dw_EBC.at[group, piece][...] = total.astype(dw_EBC.dtype)

        return first + count

    lax.while_loop(lambda first: segments_T8[jnp.minimum(first, last), 5] > 0, join_group, jnp.int32(0))


def join(segments_T8, partial_PKN, dw_EKN, *, accumulate: bool, num_blocks: int, interpret=None) -> jax.Array:
    """The matrices with those of the cut groups replaced by the sums of their partial sums, or with these added."""
    kernel = plgpu.kernel(
        lambda *refs: _join(*refs, accumulate=accumulate, num_blocks=num_blocks),
        out_type=(),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=_WARPGROUPS,
        thread_name="wg",
        kernel_name="grouped_matmul_join_segments",
        interpret=interpret,
    )
    partial_PBC, dw_EBC = (array.reshape(array.shape[0], -1, _PIECE) for array in (partial_PKN, dw_EKN))
    pieces = jax.new_ref(dw_EBC)
    kernel(segments_T8, partial_PBC, pieces)
    return jax.freeze(pieces).reshape(dw_EKN.shape)
