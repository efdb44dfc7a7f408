"""KDA's TPU kernels compiled for real chips on a machine without one: sizes of code, VMEM and HBM, and what is moved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="needs libtpu: make test-tpu")

from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding  # noqa: E402

from pallas_kernels.kda import kda  # noqa: E402
from pallas_kernels.kda.tpu import blocks, kda_tpu, transition_tpu  # noqa: E402
from pallas_kernels.kda.tpu.backward import backward  # noqa: E402
from pallas_kernels.kda.tpu.blocks import Geometry, operand_specs  # noqa: E402
from pallas_kernels.kda.tpu.chunk import Arithmetic  # noqa: E402
from pallas_kernels.kda.tpu.forward import SPEC_NAMES, Operands, forward, present  # noqa: E402
from tests.tpu.chips import VMEM, describe, kernels_vmem  # noqa: E402

pytestmark = pytest.mark.aot

BF16, F32 = jnp.bfloat16, jnp.float32
FULL = {"heads": 96, "tokens": 8192}


def sharding(topology: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])


def geometry(*, heads: int, tokens: int, packed: bool = True, full: bool = False) -> Geometry:
    return Geometry(
        arithmetic=Arithmetic(-5.0, 128**-0.5, full),
        batch=1,
        tokens=tokens,
        heads=heads,
        key_width=128,
        value_width=128,
        chunk=blocks.CHUNK,
        chunks_per_block=blocks.CHUNKS_PER_BLOCK,
        packed=packed,
        transition=False,
        interpret=False,
    )


def abstract_operands(g: Geometry, place: SingleDeviceSharding | None) -> tuple[Operands, jax.ShapeDtypeStruct]:
    """Operands and kept states of the kernels, as shapes."""

    def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    tokens = shape(g.batch, g.tokens, g.heads * g.key_width, dtype=F32 if g.arithmetic.full else BF16)
    chunks = g.blocks * g.chunks_per_block
    beta, per_head = shape(g.batch, g.groups, chunks, g.group, g.chunk), shape(g.groups, g.group, g.key_width)
    code = shape(g.batch, 1, g.blocks * g.block) if g.packed else None
    state = shape(g.batch, g.heads, g.value_width, g.key_width)
    operands = Operands(tokens, tokens, tokens, tokens, beta, per_head, per_head, code, state)
    return operands, shape(g.batch, g.blocks, g.heads, g.value_width, g.key_width)


def kernel(g: Geometry, name: str, place: SingleDeviceSharding):
    """The kernel as a function, and its abstract arguments."""
    operands, states = abstract_operands(g, place)
    if name == "forward":
        return partial(forward, g, keep_states=True), (operands,)
    return partial(backward, g), (operands, states, operands.v, operands.state)


def compile_for(function, arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def inputs_and_output_bytes(g: Geometry) -> int:
    """q, k, v, gate, beta, the two per-head vectors, documents and the initial state read once; output and final state written once."""
    operands, _ = abstract_operands(g, None)
    arrays = [*jax.tree.leaves(operands), operands.v, operands.state]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def fetches(spec: pl.BlockSpec, grid: Sequence[int]) -> int:
    """How often the pipeline moves a block: once per change of its place along the grid's walk."""
    count, before = 0, None
    for step in range(math.prod(grid)):
        index, rest = [], step
        for size in reversed(grid):
            rest, at = divmod(rest, size)
            index.append(at)
        place = tuple(int(i) for i in spec.index_map(*reversed(index)))
        count, before = count + (place != before), place
    return count


def moved_bytes(specs: Sequence[tuple[pl.BlockSpec, jnp.dtype]], grid: Sequence[int]) -> int:
    """HBM bytes of a kernel, counted from its block specs."""
    return sum(fetches(spec, grid) * math.prod(spec.block_shape) * jnp.dtype(dtype).itemsize for spec, dtype in specs)


def forward_bytes(g: Geometry, *, keep_states: bool) -> int:
    """HBM bytes of the forward kernel, from its block specs and the walk of its grid."""
    specs, (operands, _) = operand_specs(g, reverse=False), abstract_operands(g, None)
    moved = [(specs[SPEC_NAMES[name]], getattr(operands, name).dtype) for name in present(Operands._fields, g)]
    moved += [(specs["value"], operands.v.dtype), (specs["state"], F32)]
    return moved_bytes(moved + [(specs["states"], F32)] * keep_states, g.grid)


@pytest.mark.parametrize("packed", [False, True])
def test_forward_moves_little_more_than_its_inputs_and_outputs(packed: bool) -> None:
    g = geometry(**FULL, packed=packed)
    once = inputs_and_output_bytes(g)
    for keep_states in (False, True):
        moved = forward_bytes(g, keep_states=keep_states)
        kept = ", keeping states" if keep_states else ""
        print(f"KDA, forward, H=96 T=8192, packed={packed}{kept}: {moved / 1e6:.0f} MB moved, {moved / once:.3f} of everything once")
        assert moved <= 1.5 * once


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("topology", VMEM)
def test_kernels_compile_at_full_size(topology: str, name: str) -> None:
    g = geometry(**FULL)
    compiled = compile_for(*kernel(g, name, sharding(topology)))
    memory, (vmem,) = compiled.memory_analysis(), kernels_vmem(compiled).values()
    print(describe(f"{topology} KDA, {name}, H=96 K=V=128 T=8192", compiled))
    assert 0 < vmem <= blocks.VMEM_LIMIT <= VMEM[topology]
    assert memory.temp_size_in_bytes < 0.01 * memory.argument_size_in_bytes


def inputs(place: Sharding, batch: int, tokens: int, heads: int, key_width: int, value_width: int, dtype):
    def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    keys, beta = shape(batch, tokens, heads, key_width, dtype=dtype), shape(batch, tokens, heads, dtype=dtype)
    v = shape(batch, tokens, heads, value_width, dtype=dtype)
    return keys, keys, v, keys, beta, shape(heads), shape(heads, key_width)


@pytest.mark.parametrize(("topology", "dtype"), [("v5p:2x2x2", F32), ("v6e:4x4", BF16), ("tpu7x:2x2x2", F32)])
def test_function_and_gradient_compile_at_odd_sizes(topology: str, dtype) -> None:
    """Widths below the lanes, rows that end inside a block, three heads, documents."""

    def gradients(ids, *inputs):
        results, pull_back = jax.vjp(partial(kda_tpu, lower_bound=-5.0, segment_ids_BT=ids), *inputs)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    place = sharding(topology)
    ids = jax.ShapeDtypeStruct((2, 300), jnp.int32, sharding=place)
    compiled = compile_for(gradients, (ids, *inputs(place, 2, 300, 3, 64, 96, dtype)))
    print(describe(f"{topology} KDA with gradient, odd sizes, {dtype.__name__}", compiled))
    assert 0 < max(kernels_vmem(compiled).values()) <= VMEM[topology]


@pytest.mark.parametrize("topology", VMEM)
def test_transition_compiles_at_full_size(topology: str) -> None:
    def gradients(ids, *inputs):
        results, pull_back = jax.vjp(partial(transition_tpu, lower_bound=-5.0, segment_ids_BT=ids), *inputs)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    place = sharding(topology)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=place)
    compiled = compile_for(gradients, (ids, *inputs(place, 1, 8192, 96, 128, 128, BF16)[1:]))
    print(describe(f"{topology} KDA, transition with gradient, H=96 K=V=128 T=8192", compiled))
    assert 0 < max(kernels_vmem(compiled).values()) <= VMEM[topology]


def test_projections_and_kernel_share_layouts() -> None:
    """Between the products that make q, k, v and gate and the one that reads o, no array is copied into another layout."""
    place = sharding("v5p:2x2x2")
    x = jax.ShapeDtypeStruct((1, 1024, 256), BF16, sharding=place)
    weight = jax.ShapeDtypeStruct((256, 8, 128), BF16, sharding=place)

    def layer(x, w_q, w_k, w_v, w_gate, w_o, beta, a_log, dt_bias):
        q, k, v, gate = (jnp.einsum("btd,dhk->bthk", x, w) for w in (w_q, w_k, w_v, w_gate))
        o, _ = kda_tpu(q, k, v, gate, beta, a_log, dt_bias, lower_bound=-5.0)
        return jnp.einsum("bthv,dhv->btd", o, w_o)

    beta, a_log, dt_bias = inputs(place, 1, 1024, 8, 128, 128, BF16)[4:]
    text = compile_for(layer, (x, *[weight] * 5, beta, a_log, dt_bias)).as_text()
    copies = [line for line in text.splitlines() if re.search(r"= bf16\[1,1024,(8,128|1024)\]\S* (copy|transpose|reshape)\(", line)]
    assert not copies, copies


def test_kernels_choose_themselves_inside_a_shard_map(topology: str, mesh) -> None:
    """By the mesh's devices, not the process's."""
    rows = NamedSharding(mesh, PartitionSpec("all"))
    q, k, v, gate, beta, a_log, dt_bias = inputs(rows, mesh.size, 256, 4, 128, 128, BF16)
    whole = NamedSharding(mesh, PartitionSpec())
    a_log, dt_bias = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in (a_log, dt_bias))
    split, specs = PartitionSpec("all"), (PartitionSpec("all"),) * 5 + (PartitionSpec(),) * 2
    run = jax.shard_map(partial(kda, lower_bound=-5.0), mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    compiled = compile_for(run, (q, k, v, gate, beta, a_log, dt_bias))
    assert [name for name in kernels_vmem(compiled) if "kda_forward" in name], compiled.as_text()[-2000:]
    print(describe(f"{topology} KDA in a shard_map, {mesh.size} devices", compiled))
