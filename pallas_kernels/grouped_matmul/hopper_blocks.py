"""What the grouped matmul's Hopper kernels share: the blocks that run, and the memory and barriers they pass tiles through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WG_FEATURES = 64  # features per consumer warpgroup: wgmma's M
CONSUMERS = 2
ALIGN = 8  # rows: a box in the tiled layout that wgmma reads starts at a multiple of this


def tiled(shape: tuple[int, ...], dtype: jnp.dtype):
    """Shared memory in the (8 rows, 128 bytes) swizzled tiles that TMA writes and wgmma reads."""
    swizzle = plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)))


def released_barrier(stages: int, cluster: int = 1):
    """Counts the consumers that are done with a stage, in all blocks of a cluster, as its next content reaches them all."""
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    return plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=CONSUMERS, num_barriers=stages)


def blocks(num_sms: int, cluster: int = 1) -> dict:
    """One block per SM, in clusters of `cluster` that share what they load: two consumer warpgroups and a producer each."""
    clusters = dict(cluster=(cluster,), cluster_names=("peer",)) if cluster > 1 else {}
    return dict(grid=(num_sms // cluster,), grid_names=("worker",), num_threads=CONSUMERS + 1, thread_name="wg", **clusters)


def multiply_steps(acc, num_steps, turn, stages, full, empty, operands, before=lambda step: None) -> jax.Array:
    """The accumulator plus the products of a tile's steps, which take the ring's turns from `turn` on; a warpgroup's part of it.

    `operands(step, slot)` gives a step's two operands once its stage is full, `before(step)` runs ahead of that. A stage goes
    back when the product after its own has begun.
    """

    def give_back(step):
        plgpu.barrier_arrive(empty.at[lax.rem(turn + step, stages)])

    @pl.loop(jnp.int32(0), num_steps)
    def _step(step):
        before(step)
        slot = lax.rem(turn + step, stages)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(acc, *operands(step, slot))
        plgpu.wgmma_wait(1)
        pl.when(step > 0)(lambda: give_back(step - 1))

    plgpu.wgmma_wait(0)
    pl.when(num_steps > 0)(lambda: give_back(num_steps - 1))
    return acc[...]


def vary_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """Inside `shard_map`: the array as one that varies over the mesh axes of another, which a kernel's result does not say."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(axes)), to="varying") if axes else array


def store_unswizzled(ref, value: jax.Array) -> None:
    """Writes to shared memory whose plain layout costs bank conflicts: since JAX 0.12 that has to be said, before it could not."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
