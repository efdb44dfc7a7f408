"""The grouped matmul's TPU kernels compiled for chips: at K3's sizes, at odd ones, in float32, and chosen by themselves.

Shapes: M rows, E groups, K in, N out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.tpu_tiles import PART, Chip, choose_rows_tiles, choose_weights_tiles, list_visits
from pallas_kernels.grouped_matmul.tpu_weights import weights_gradient
from tests.tpu.chips import MIB, VMEM, describe, kernels_vmem

pytestmark = pytest.mark.aot

KERNELS = {
    "forward": rows_matmul,
    "gradient to rows": functools.partial(rows_matmul, transpose_w=True),
    "gradient to weights": weights_gradient,
}
# M, E, K, N of one device's rows: all of K3's experts on it, and an eighth of them, gate and up joined.
SHAPES = {"896 experts, 3584 -> 3072": (65536, 896, 3584, 3072), "112 experts, 3584 -> 6144": (65536, 112, 3584, 6144)}
# Dtype of the arrays, JAX's matmul precision, and M, E, K, N.
ODD = {
    "bfloat16": ("bfloat16", None, (77, 5, 24, 200)),
    "float32": ("float32", None, (1000, 5, 300, 40)),
    "float32 with bfloat16 products": ("float32", "bfloat16", (1000, 5, 300, 40)),
    "bfloat16 where float32 keeps all bits": ("bfloat16", "highest", (77, 5, 24, 200)),
}


def compile_on_every_device(function, mesh, *shapes):
    """The function on each device's own copy of the arrays, in a shard_map that is manual over the whole mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
    run = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(run).lower(*arguments).compile()


def operands(kernel, shape, dtype):
    M, E, K, N = shape
    rows, cotangents, matrices = ((M, K), dtype), ((M, N), dtype), ((E, K, N), dtype)
    first = {"forward": (rows, matrices), "gradient to rows": (cotangents, matrices), "gradient to weights": (rows, cotangents)}[kernel]
    return *first, ((E,), "int32")


def check_compiled(compiled, topology, shape):
    M, E, *_ = shape
    vmem, memory = kernels_vmem(compiled), compiled.memory_analysis()
    assert len(vmem) == 1 and 0 < max(vmem.values()) <= VMEM[topology] * 9 // 10
    assert memory.temp_size_in_bytes < 1e6 < E * M * 4 or M < 1e4  # nothing of size E M


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_at_full_size(topology, mesh, name, kernel):
    compiled = compile_on_every_device(KERNELS[kernel], mesh, *operands(kernel, SHAPES[name], "bfloat16"))
    print(describe(f"{topology} grouped matmul, {kernel}, {name}", compiled))
    check_compiled(compiled, topology, SHAPES[name])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_at_full_size_with_float32_results(topology, mesh, name, kernel):
    M, E, K, N = SHAPES[name]
    if topology.startswith("v6e") and kernel == "gradient to weights":
        E = min(E, 448)  # 896 matrices in float32 are 39 GB, more than its HBM; tiles do not depend on their number
    run = functools.partial(KERNELS[kernel], out_dtype="float32")
    compiled = compile_on_every_device(run, mesh, *operands(kernel, (M, E, K, N), "bfloat16"))
    print(describe(f"{topology} grouped matmul, {kernel}, float32 results, {E} experts, {K} -> {N}", compiled))
    check_compiled(compiled, topology, (M, E, K, N))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_in_float32(topology, mesh, kernel):
    shape = (8192, 16, 3584, 3072)
    compiled = compile_on_every_device(KERNELS[kernel], mesh, *operands(kernel, shape, "float32"))
    print(describe(f"{topology} grouped matmul, {kernel}, float32, 16 experts, 3584 -> 3072", compiled))
    check_compiled(compiled, topology, shape)


@pytest.mark.parametrize("form", ODD)
def test_chosen_by_itself_and_differentiated_at_odd_sizes(topology, mesh, form):
    """With the process's default backend a CPU, the mesh says what is compiled for."""

    def gradients(x_MK, w_EKN, sizes_E):
        y_MN, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E), x_MK, w_EKN)
        return y_MN, *pullback(jnp.ones_like(y_MN))

    dtype, products, (M, E, K, N) = ODD[form]
    with jax.default_matmul_precision(products):
        compiled = compile_on_every_device(gradients, mesh, ((M, K), dtype), ((E, K, N), dtype), ((E,), "int32"))
    names = {name.split(".")[0] for name in kernels_vmem(compiled)}
    assert names == {"grouped_matmul_rows", "grouped_matmul_rows_transposed", "grouped_matmul_weights"}, names


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1000, 5, 30000, 300), (1000, 5, 200, 30000)])
def test_matrices_too_large_for_a_tile_compile(topology, mesh, shape):
    """Contracted in steps with a ragged last one, in both directions, and many tiles of features."""
    for kernel in KERNELS:
        check_compiled(compile_on_every_device(KERNELS[kernel], mesh, *operands(kernel, shape, "bfloat16")), topology, shape)


PEAKS = {"v5p": (459e12, 2.765e12), "v6e": (918e12, 1.64e12)}  # bf16 operations and HBM bytes a second of one device
CHIPS = {"v5p": Chip(2, 64 * MIB), "v6e": Chip(1, 128 * MIB)}


def changes(tiles_V):
    """Blocks moved in a walk, where a block stays as long as its index does."""
    return 1 + np.count_nonzero(np.diff(tiles_V))


def count(kernel, shape, chip, out_itemsize):
    """(operations on the MXU, HBM bytes) with bfloat16 operands and groups of nearly one size, walked as the grid is."""
    M, E, K, N = shape
    sizes_E = np.diff(np.arange(E + 1) * M // E)
    if kernel == "gradient to rows":
        K, N = N, K
    is_weights = kernel == "gradient to weights"
    tiles = choose_weights_tiles(M, K, N, 2, chip) if is_weights else choose_rows_tiles(M, K, N, 2, out_itemsize, chip)
    visits = jax.device_get(list_visits(jnp.asarray(sizes_E, jnp.int32), M, tiles.rows, for_rows=not is_weights))
    group_V, tile_V = visits.group_V[: visits.count], visits.tile_V[: visits.count]
    start_V, end_V = (np.clip(visits.start_G1[group_V + i] - tile_V * tiles.rows, 0, tiles.rows) for i in (0, 1))
    multiplied = np.sum((-(-end_V // PART) - start_V // PART) * PART)
    if is_weights:
        across_k, across_n = -(-K // tiles.k), -(-N // tiles.n)
        read, written = changes(tile_V) * tiles.rows * (K * across_n + N * across_k), changes(group_V) * K * N
    else:
        read = changes(tile_V) * tiles.rows * K * -(-N // tiles.features) + changes(group_V) * K * N
        written = changes(tile_V) * tiles.rows * N
    return 2 * multiplied * K * N, 2 * read + out_itemsize * written


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("target", PEAKS)
@pytest.mark.parametrize("results", ["bfloat16", "float32"])
def test_bytes_moved_are_near_those_of_everything_once(target, name, kernel, results):
    M, E, K, N = SHAPES[name]
    out_itemsize = jnp.dtype(results).itemsize
    operations, moved = count(kernel, SHAPES[name], CHIPS[target], out_itemsize)
    written = {"forward": M * N, "gradient to rows": M * K, "gradient to weights": E * K * N}[kernel]
    once, needed = 2 * (M * (K + N) + E * K * N) + (out_itemsize - 2) * written, 2 * M * K * N
    milliseconds = [1e3 * amount / peak for amount, peak in zip((operations, moved), PEAKS[target], strict=True)]
    print(
        f"{target} grouped matmul, {kernel}, {results} results, {name}: "
        f"MXU {operations / 1e12:.2f} TFLOP ({operations / needed:.2f} of what is needed), "
        f"HBM {moved / 1e9:.2f} GB ({moved / once:.2f} of once), "
        f"roofline {max(milliseconds):.2f} ms (MXU {milliseconds[0]:.2f}, HBM {milliseconds[1]:.2f})"
    )
    assert moved <= 1.5 * once
