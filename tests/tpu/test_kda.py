"""KDA's TPU kernels compiled for real chips on a machine without one: sizes of code, VMEM and HBM, and what is moved."""

from __future__ import annotations

import math
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing is run, so processes may share it
pytest.importorskip("libtpu", reason="needs libtpu: make test-tpu")

from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels.kda.tpu import blocks, kda_tpu, transition_tpu  # noqa: E402
from pallas_kernels.kda.tpu.backward import backward  # noqa: E402
from pallas_kernels.kda.tpu.blocks import Geometry, moved_bytes, operand_specs  # noqa: E402
from pallas_kernels.kda.tpu.chunk import Arithmetic  # noqa: E402
from pallas_kernels.kda.tpu.forward import SPEC_NAMES, Operands, forward, present  # noqa: E402

pytestmark = pytest.mark.aot

MIB = 2**20
# VMEM of one core.
TOPOLOGIES = {"v5p:2x2x2": 64 * MIB, "v6e:4x4": 128 * MIB, "tpu7x:2x2x2": 64 * MIB}
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


def vmem_bytes(g: Geometry, name: str, place: SingleDeviceSharding, monkeypatch: pytest.MonkeyPatch) -> int:
    """VMEM that the compiler asks for: it says so when it is given too little."""
    monkeypatch.setattr(blocks, "VMEM_LIMIT", MIB)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        compile_for(*kernel(g, name, place))
    monkeypatch.undo()
    size, unit = re.search(r"allocation with size ([\d.]+)([KM])", str(caught.value)).groups()
    return int(float(size) * (MIB if unit == "M" else 1024))


def inputs_and_output_bytes(g: Geometry) -> int:
    """q, k, v, gate, beta, the two per-head vectors, documents and the initial state read once; output and final state written once."""
    operands, _ = abstract_operands(g, None)
    arrays = [*jax.tree.leaves(operands), operands.v, operands.state]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def forward_bytes(g: Geometry, *, keep_states: bool) -> int:
    """HBM bytes of the forward kernel, from its block specs and the walk of its grid."""
    specs, (operands, _) = operand_specs(g, reverse=False), abstract_operands(g, None)
    moved = [(specs[getattr(SPEC_NAMES, name)], getattr(operands, name).dtype) for name in present(Operands._fields, g)]
    moved += [(specs["value"], operands.v.dtype), (specs["state"], F32)]
    return moved_bytes(moved + [(specs["states"], F32)] * keep_states, g.grid)


@pytest.mark.parametrize("packed", [False, True])
def test_forward_moves_little_more_than_its_inputs_and_outputs(packed: bool) -> None:
    g = geometry(**FULL, packed=packed)
    once = inputs_and_output_bytes(g)
    for keep_states in (False, True):
        moved = forward_bytes(g, keep_states=keep_states)
        print(f"\nforward, packed={packed}, keep_states={keep_states}: {moved / 1e6:.0f} MB moved, {moved / once:.3f} of once")
        assert moved <= 1.5 * once


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernels_compile_at_full_size(topology: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, g = sharding(topology), geometry(**FULL)
    compiled = compile_for(*kernel(g, name, place))
    memory = compiled.memory_analysis()
    vmem = vmem_bytes(geometry(heads=8, tokens=512), name, place, monkeypatch)  # per block, so sizes do not matter
    print(
        f"\n{topology} KDA {name}, H=96 K=V=128 T=8192: code {memory.generated_code_size_in_bytes / 1e6:.2f} MB, VMEM {vmem / MIB:.1f} MiB, "
        f"HBM arguments {memory.argument_size_in_bytes / 1e6:.0f} MB, results {memory.output_size_in_bytes / 1e6:.0f} MB, "
        f"temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB"
    )
    assert vmem <= blocks.VMEM_LIMIT <= TOPOLOGIES[topology]
    assert memory.temp_size_in_bytes < 0.01 * memory.argument_size_in_bytes


def inputs(place: SingleDeviceSharding, batch: int, tokens: int, heads: int, key_width: int, value_width: int, dtype):
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
    memory = compile_for(gradients, (ids, *inputs(place, 2, 300, 3, 64, 96, dtype))).memory_analysis()
    print(f"\n{topology} KDA with gradient, odd sizes: code {memory.generated_code_size_in_bytes / 1e6:.2f} MB")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_transition_compiles_at_full_size(topology: str) -> None:
    def gradients(ids, *inputs):
        results, pull_back = jax.vjp(partial(transition_tpu, lower_bound=-5.0, segment_ids_BT=ids), *inputs)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    place = sharding(topology)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=place)
    memory = compile_for(gradients, (ids, *inputs(place, 1, 8192, 96, 128, 128, BF16)[1:])).memory_analysis()
    print(f"\n{topology} KDA transition with gradient, H=96 T=8192: code {memory.generated_code_size_in_bytes / 1e6:.2f} MB")


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
