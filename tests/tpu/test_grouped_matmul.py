"""The grouped matmul's TPU kernels compiled for chips: at K3's sizes, at odd ones, in float32, and chosen by themselves.

Shapes: M rows, E groups, K in, N out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.tpu_weights import weights_gradient
from tests.tpu.chips import VMEM, describe, kernels_vmem

pytestmark = pytest.mark.aot

KERNELS = {
    "forward": rows_matmul,
    "gradient to rows": functools.partial(rows_matmul, transpose_w=True),
    "gradient to weights": weights_gradient,
}
# M, E, K, N of one device's rows: all of K3's experts on it, and an eighth of them, gate and up joined.
SHAPES = {"896 experts, 3584 -> 3072": (65536, 896, 3584, 3072), "112 experts, 3584 -> 6144": (65536, 112, 3584, 6144)}
ODD = {"bfloat16": (77, 5, 24, 200), "float32": (1000, 5, 300, 40)}


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
def test_kernels_compile_in_float32(topology, mesh, kernel):
    shape = (8192, 16, 3584, 3072)
    compiled = compile_on_every_device(KERNELS[kernel], mesh, *operands(kernel, shape, "float32"))
    print(describe(f"{topology} grouped matmul, {kernel}, float32, 16 experts, 3584 -> 3072", compiled))
    check_compiled(compiled, topology, shape)


@pytest.mark.parametrize("dtype", ODD)
def test_chosen_by_itself_and_differentiated_at_odd_sizes(topology, mesh, dtype):
    """With the process's default backend a CPU, the mesh says what is compiled for."""

    def gradients(x_MK, w_EKN, sizes_E):
        y_MN, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E), x_MK, w_EKN)
        return y_MN, *pullback(jnp.ones_like(y_MN))

    M, E, K, N = ODD[dtype]
    compiled = compile_on_every_device(gradients, mesh, ((M, K), dtype), ((E, K, N), dtype), ((E,), "int32"))
    names = {name.split(".")[0] for name in kernels_vmem(compiled)}
    assert names == {"grouped_matmul_rows", "grouped_matmul_rows_transposed", "grouped_matmul_weights"}, names


@pytest.mark.parametrize("shape", [(1000, 5, 30000, 300), (1000, 5, 200, 30000)])
def test_matrices_too_large_for_a_tile_compile(topology, mesh, shape):
    """Contracted in steps with a ragged last one, in both directions, and many tiles of features."""
    for kernel in KERNELS:
        check_compiled(compile_on_every_device(KERNELS[kernel], mesh, *operands(kernel, shape, "bfloat16")), topology, shape)
