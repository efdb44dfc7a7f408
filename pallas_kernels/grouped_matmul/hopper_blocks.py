"""What the grouped matmul's Hopper kernels share: the blocks that run, and the memory and barriers they pass tiles through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
