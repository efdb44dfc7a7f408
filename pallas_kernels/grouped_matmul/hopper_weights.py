"""Gradient of the grouped matmul to its weights on Hopper: dw_e = x_e^T dy_e for the rows of each group.

One Mosaic GPU kernel over the tiles of all groups' matrices, the groups with most rows first. Both operands lie in
memory with the contracted rows outermost, which wgmma takes as transposed operands from shared memory, so nothing is
rearranged. A step contracts 64 rows, its first a multiple of 8. Rows of x that are another group's are overwritten with
zeros in shared memory, by each warpgroup in the columns that only itself reads. Rows past the last group may hold
anything, so a step that reaches them has the rows of dy zeroed too, which the warpgroups share.
A long group may be cut into segments, whose FP32 sums leave straight from the registers (`hopper_segments` joins them).
A finished tile takes one turn of the ring: in bf16 one warpgroup's results wait there for the store, the other's in a buffer
of its own, and both stores drain during the next tile. FP32 results go through smaller buffers.

Shapes: M rows, E groups, K and N the matrices' sides.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

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
    tiled,
    vary_like,
)
from pallas_kernels.grouped_matmul.hopper_segments import join, partial_sums, segment_rows, segments

TILE_K = WG_FEATURES * CONSUMERS
LOADS = 2  # copies that fill a stage
SHARED_BYTES = 226 * 1024  # what a block may have, less barriers and scratch
ACCUMULATING = dict(tile_n=128, stages=5, slots=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Tiling of the weights kernel.

    A block makes 128 x `tile_n` outputs, `block_m` rows a step. `stages` is the depth of the ring that loads fill, `slots`
    the number of buffers (of 64 x `width`) that FP32 stores use; results in bf16 wait in the ring, with `slots` 0. A
    finished tile gives back what its results took before step `release` of the next. `cluster` blocks, neighbours in K,
    share what they load of dy. Groups of more than 1.5 `segment` rows are cut (`hopper_segments`), with None none is.
    """

    tile_n: int = 256
    block_m: int = 64
    stages: int = 4
    slots: int = 0
    width: int = 32
    release: int = 2
    cluster: int = 1
    num_sms: int = 132
    segment: int | None = None


def choose_config(rows: int, groups: int, k: int, n: int, out_dtype: jnp.dtype, accumulate: bool) -> WeightsConfig:
    """What measured best: the widest tile that divides N, and the ring as deep as memory allows, up to 5."""
    tile_n = max(tile for tile in (256, 192, 128, 64) if n % tile == 0)
    segment = segment_rows(rows, groups, k, n, pl.cdiv(k, TILE_K) * (n // tile_n), WeightsConfig.num_sms)
    if accumulate and n % ACCUMULATING["tile_n"] == 0:
        return WeightsConfig(**ACCUMULATING, cluster=2 if pl.cdiv(k, TILE_K) % 2 == 0 else 1, segment=segment)
    cluster = 2 if tile_n == 256 and pl.cdiv(k, TILE_K) % 2 == 0 else 1
    stage = 64 * (TILE_K + tile_n) * 2
    if jnp.dtype(out_dtype).itemsize == 2:
        return WeightsConfig(tile_n=tile_n, stages=min(5, (SHARED_BYTES - 64 * tile_n * 2) // stage), cluster=cluster, segment=segment)
    stages = 3 if accumulate else 4
    slots = min(4, tile_n * 4 // 128, (SHARED_BYTES - stages * stage) // (CONSUMERS * WG_FEATURES * 128))
    return WeightsConfig(tile_n=tile_n, stages=stages, slots=slots, cluster=cluster, segment=segment)


def _kernel(
    segments_T8, x_MK, dy_MN, dw_EKN, partial_PKN, x_smem, dy_smem, dw_smem, full, empty, zeroed, loaded, *, config, accumulate
):  # fmt: skip
    _, k, n = dw_EKN.shape
    k_tiles, n_tiles = pl.cdiv(k, TILE_K * config.cluster), pl.cdiv(n, config.tile_n)
    block_m, stages = config.block_m, jnp.int32(config.stages)
    worker, num_workers, wg = lax.axis_index("worker"), config.num_sms // config.cluster, lax.axis_index("wg")
    peer = lax.axis_index("peer") if config.cluster > 1 else 0
    num_tiles = segments_T8[0, 7] * (k_tiles * n_tiles)
    num_local = lax.div(num_tiles - worker + (num_workers - 1), jnp.int32(num_workers))
    in_ring = int(not config.slots)  # turns of the ring that a tile's results take

    def lookup(local):
        """(group, first row, head, rows with head, partial sum, first of K, first of N) of this block's tile `local`, or the last's."""
        linear = jnp.minimum(local * num_workers + worker, num_tiles - 1)
        segment, tile = lax.div(linear, jnp.int32(k_tiles * n_tiles)), lax.rem(linear, jnp.int32(k_tiles * n_tiles))
        at_k, at_n = lax.div(tile, jnp.int32(n_tiles)), lax.rem(tile, jnp.int32(n_tiles))
        partial = jnp.where(segments_T8[segment, 5] > 0, segment, -1)
        return *(segments_T8[segment, i] for i in range(4)), partial, (at_k * config.cluster + peer) * TILE_K, at_n * config.tile_n

    def for_each_tile(body):
        def step(local, carry):
            entry, done = carry
            following = lookup(local + 1)  # asked for now, needed after this tile
            num_steps = lax.div(entry[3] + (block_m - 1), jnp.int32(block_m))
            *segment, at_k, at_n = entry
            body(*segment, pl.multiple_of(at_k, TILE_K), pl.multiple_of(at_n, config.tile_n), num_steps, done)
            return following, done + num_steps + in_ring

        return lax.fori_loop(jnp.int32(0), num_local, step, (lookup(jnp.int32(0)), jnp.int32(0)))[1]

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def claim(turn):
            @pl.when(turn >= stages)
            def _():
                plgpu.barrier_wait(empty.at[lax.rem(turn, stages)])

            return lax.rem(turn, stages)

        def load_tile(group, first, head, rows, partial, at_k, at_n, num_steps, done):
            del group, head, rows, partial

            @pl.loop(jnp.int32(0), num_steps)
            def _step(step):
                slot = claim(done + step)
                at_m = pl.ds(pl.multiple_of(first + step * block_m, ALIGN), block_m)
                plgpu.copy_gmem_to_smem(x_MK.at[at_m, pl.ds(at_k, TILE_K)], x_smem.at[slot], full.at[slot])
                dy_tile, shared = dy_MN.at[at_m, pl.ds(at_n, config.tile_n)], "peer" if config.cluster > 1 else None
                plgpu.copy_gmem_to_smem(dy_tile, dy_smem.at[slot], full.at[slot], collective_axes=shared)

            if in_ring:
                slot = claim(done + num_steps)
                for _ in range(LOADS):
                    plgpu.barrier_arrive(full.at[slot])

        done = for_each_tile(load_tile)

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    def zero_outside(smem, slot, column, begin, end):
        """Zeros the rows of a buffer outside [begin, end), in 64 columns."""
        ref = smem.at[slot, :, pl.ds(column, 64)]
        value = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, (block_m, 64), 0, layout=plgpu.Layout.WGMMA)
        ref[...] = jnp.where((row >= begin) & (row < end), value, jnp.zeros_like(value))

    @pl.when(wg < CONSUMERS)
    def _consume():
        plgpu.set_max_registers(232, action="increase")
        wg_column = pl.multiple_of(wg * WG_FEATURES, WG_FEATURES)

        def release_results(done):
            """Gives back the stage of the last tile's results, which the stores have read."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if in_ring:
                pl.when(done > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(done - 1, stages)]))

        def compute(group, first, head, rows, partial, at_k, at_n, num_steps, done):
            width = config.tile_n if in_ring else dw_smem.shape[-1]
            chunks, inside = config.tile_n // width, at_k + wg_column < k
            writes = inside & (rows > 0) if accumulate else inside
            if partial_PKN is not None:
                writes &= partial < 0
            at_features = pl.ds(at_k + wg_column, WG_FEATURES)

            def at_chunk(chunk):
                return dw_EKN.at[group, at_features, pl.ds(at_n + chunk * width, width)]

            def load_old(chunk):
                slot = chunk % config.slots
                plgpu.copy_gmem_to_smem(at_chunk(chunk), dw_smem.at[wg, slot], loaded.at[wg * config.slots + slot])

            def load_first(chunk):
                pl.when(writes)(lambda: load_old(chunk))

            ahead = range(min(config.slots, chunks) if accumulate else 0)  # old values that are loaded during the multiplication

            @pl.when(num_steps == 0)
            def _():
                release_results(done)

            def before(step):
                pl.when(step == jnp.minimum(config.release, num_steps - 1))(lambda: release_results(done))
                for chunk in ahead:  # one a step: all at once would hold up the loads of the following steps
                    at_step = jnp.minimum(config.release + chunk, num_steps - 1)
                    pl.when(step == at_step)(functools.partial(load_first, chunk))

            def operands(step, slot):
                begin, end = jnp.where(step == 0, head, 0), rows - step * block_m

                @pl.when((begin > 0) | (end < block_m))
                def _other_rows():
                    zero_outside(x_smem, slot, wg_column, begin, end)
                    past_groups = first + (step + 1) * block_m > segments_T8[0, 6]

                    @pl.when(past_groups)
                    def _():
                        for column in range(0, config.tile_n, 64):
                            mine = wg == column // 64 % CONSUMERS
                            pl.when(mine)(functools.partial(zero_outside, dy_smem, slot, column, begin, end))

                    plgpu.commit_smem()

                    @pl.when(past_groups)
                    def _():
                        plgpu.barrier_arrive(zeroed)
                        plgpu.barrier_wait(zeroed)

                return x_smem.at[slot, :, pl.ds(wg_column, WG_FEATURES)].transpose((1, 0)), dy_smem.at[slot]

            def contract(acc):
                return multiply_steps(acc, num_steps, done, stages, full, empty, operands, before)

            total = pl.run_scoped(contract, plgpu.ACC((WG_FEATURES, config.tile_n), jnp.float32))
            value = total.astype(dw_EKN.dtype)

            if partial_PKN is not None:

                @pl.when(inside & (partial >= 0))
                def _():
                    partial_PKN.at[partial, at_features, pl.ds(at_n, config.tile_n)][...] = total

            def store_chunks():
                for chunk in range(chunks):
                    buffer = dw_smem.at[wg, chunk % config.slots]
                    part = value[:, chunk * width : (chunk + 1) * width]
                    if accumulate:
                        plgpu.barrier_wait(loaded.at[wg * config.slots + chunk % config.slots])
                        part += buffer[...]
                    elif chunk >= config.slots:
                        plgpu.wait_smem_to_gmem(config.slots - 1, wait_read_only=True)
                    buffer[...] = part
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffer, at_chunk(chunk))
                    following = chunk - 1 + config.slots
                    if accumulate and chunk > 0 and config.slots <= following < chunks:
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        load_old(following)

            def store_tile(buffer):
                buffer[...] = value
                plgpu.commit_smem()
                pl.when(writes)(lambda: plgpu.copy_smem_to_gmem(buffer, at_chunk(0)))

            if in_ring:
                slot = lax.rem(done + num_steps, stages)
                plgpu.barrier_wait(full.at[slot])
                pl.when(wg == 0)(lambda: store_tile(dy_smem.at[slot]))
                pl.when(wg == 1)(lambda: store_tile(dw_smem))
            else:
                pl.when(writes)(store_chunks)

        release_results(for_each_tile(compute))
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))  # lowered once for all the layers that call it
def weights_gradient(
    x_MK: jax.Array,
    dy_MN: jax.Array,
    group_sizes_E: jax.Array,
    *,
    out_dtype=None,
    accumulate_into: jax.Array | None = None,
    config: WeightsConfig | None = None,
    interpret=None,
) -> jax.Array:
    """Sums x^T dy over the rows of each group.

    Args:
      x_MK: rows sorted by group, bfloat16; M a multiple of 8, K of 64.
      dy_MN: cotangents of the same rows, same dtype; N a multiple of 64.
      group_sizes_E: integers, at least 0, with a sum of at most M. Rows past the sum do not count, whatever they hold.
      out_dtype: x's dtype (the default) or float32.
      accumulate_into: float32 [E, K, N] to which the sums are added; donated where the caller donates it.

    Returns:
      dw_EKN, accumulated in FP32, zeros for groups without rows (or what `accumulate_into` held).
    """
    (rows, k), n, dtype, groups = x_MK.shape, dy_MN.shape[1], x_MK.dtype, group_sizes_E.shape[0]
    accumulate = accumulate_into is not None
    out_dtype = jnp.dtype(jnp.float32 if accumulate else out_dtype or dtype)
    if accumulate and (accumulate_into.shape != (groups, k, n) or accumulate_into.dtype != jnp.float32):
        raise ValueError(f"accumulate_into is {accumulate_into.dtype}{accumulate_into.shape}, wanted float32{(groups, k, n)}")
    config = config or choose_config(rows, groups, k, n, out_dtype, accumulate)
    kept = (CONSUMERS, config.slots, WG_FEATURES, config.width) if config.slots else (WG_FEATURES, config.tile_n)
    num_partial = partial_sums(rows, config.segment) if config.segment else 0

    def body(segments_ref, x_ref, dy_ref, *refs, **scratch):
        dw_ref, partial_ref = refs if config.segment else (*refs, None)
        _kernel(segments_ref, x_ref, dy_ref, dw_ref, partial_ref, **scratch, config=config, accumulate=accumulate)

    out_types = () if accumulate else (jax.ShapeDtypeStruct((groups, k, n), out_dtype),)
    kernel = plgpu.kernel(
        body,
        out_type=(*out_types, jax.ShapeDtypeStruct((num_partial, k, n), jnp.float32)) if config.segment else out_types,
        scratch_types=dict(
            x_smem=tiled((config.stages, config.block_m, TILE_K), dtype),
            dy_smem=tiled((config.stages, config.block_m, config.tile_n), dtype),
            dw_smem=tiled(kept, out_dtype),
            full=plgpu.Barrier(num_arrivals=LOADS, num_barriers=config.stages),
            empty=released_barrier(config.stages, config.cluster),
            zeroed=plgpu.Barrier(num_arrivals=CONSUMERS),
            loaded=plgpu.Barrier(num_barriers=CONSUMERS * max(config.slots, 1)),
        ),
        **blocks(config.num_sms, config.cluster),
        kernel_name="grouped_matmul_grad_weights",
        interpret=interpret,
    )
    segments_T8 = segments(group_sizes_E, config.segment, num_partial)
    total = [jax.new_ref(accumulate_into)] if accumulate else []
    results = cast(tuple[jax.Array, ...], kernel(segments_T8, x_MK, dy_MN, *total))
    dw_EKN = jax.freeze(total[0]) if accumulate else results[0]
    if config.segment:
        dw_EKN = join(segments_T8, results[-1], dw_EKN, accumulate=accumulate, num_blocks=config.num_sms, interpret=interpret)
    return vary_like(dw_EKN, x_MK)
