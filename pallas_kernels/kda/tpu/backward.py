"""KDA's backward kernel on TPU: blocks from the last to the first, the state's gradient in VMEM.

B batch, T tokens, H heads, P head groups of G heads, N blocks of tokens, C tokens of a chunk, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.blocks import BACKWARD_ABREAST, Geometry, operand_specs
from pallas_kernels.kda.tpu.chunk import Packing, Raw, chunk_gradient, chunk_step
from pallas_kernels.kda.tpu.forward import SPEC_NAMES, Operands, load_packing, load_raw, load_tokens, present


def _body(*all_refs, names: list[str], geometry: Geometry) -> None:
    refs, g = dict(zip(names, all_refs, strict=True)), geometry
    step, abreast = pl.program_id(2), g.abreast(BACKWARD_ABREAST)
    block = g.blocks - 1 - step
    d_state, inner = refs["carried"], refs["inner"]

    @pl.when(step == 0)
    def _():
        d_state[...] = refs["d_final"][0]
        refs["d_slope"][...] = jnp.zeros(refs["d_slope"].shape, jnp.float32)
        refs["d_bias"][...] = jnp.zeros(refs["d_bias"].shape, jnp.float32)

    def load(heads: list[jax.Array], chunk: jax.Array) -> tuple[Packing | None, list[Raw], list[jax.Array]]:
        raws = [load_raw(refs, g, head, chunk, block) for head in heads]
        return load_packing(refs, g, chunk), raws, [inner[i, chunk] for i in range(abreast)]

    def advance(heads: list[jax.Array], chunk: jax.Array) -> None:
        packing, raws, states = load(heads, chunk)
        _, states = chunk_step(g.arithmetic, packing, [raw._replace(q_CK=None) for raw in raws], states)
        for i, state_VK in enumerate(states):
            inner[i, chunk + 1] = state_VK

    def gradient(heads: list[jax.Array], chunk: jax.Array) -> None:
        packing, raws, states = load(heads, chunk)
        d_o = [] if g.transition else [load_tokens(refs["d_o"], g, head, chunk, block) for head in heads]
        d_raws, d_before = chunk_gradient(g.arithmetic, packing, raws, states, d_o, [d_state[head] for head in heads])
        rows = pl.ds(pl.multiple_of(chunk * g.chunk, g.chunk), g.chunk)
        for head, d_raw, d_state_VK in zip(heads, d_raws, d_before, strict=True):
            d_state[head] = d_state_VK
            one = pl.ds(head, 1)
            for name, d in (("d_q", d_raw.q_CK), ("d_k", d_raw.k_CK), ("d_v", d_raw.v_CV), ("d_gate", d_raw.gate_CK)):
                if d is not None:
                    width = d.shape[1]
                    refs[name][0, rows, pl.ds(pl.multiple_of(head * width, width), width)] = d.astype(refs[name].dtype)
            refs["d_beta"][0, 0, chunk, one, :] = d_raw.beta_1C
            refs["d_slope"][0, 0, one, :] += d_raw.slope_1K
            refs["d_bias"][0, 0, one, :] += d_raw.bias_1K

    @pl.loop(0, g.group // abreast)
    def _(some):
        heads = [some * abreast + i for i in range(abreast)]
        for i, head in enumerate(heads):
            inner[i, 0] = refs["states"][0, 0, head]

        @pl.loop(0, g.chunks_per_block - 1)
        def _(chunk):
            advance(heads, chunk)

        @pl.loop(0, g.chunks_per_block)
        def _(i):
            gradient(heads, g.chunks_per_block - 1 - i)

    @pl.when(step == g.blocks - 1)
    def _():
        refs["d_initial"][0] = d_state[...]


def backward(geometry: Geometry, operands: Operands, states: jax.Array, d_o: jax.Array | None, d_final: jax.Array) -> dict[str, jax.Array]:
    """Gradients of `Operands`, named `d_q` and so on; those of slope and bias are [B, P, G, K], that of the state `d_initial`.

    `states` are the forward kernel's; `d_o` is [B, T, H V] (None in a transition), `d_final` [B, H, V, K].
    """
    g = geometry
    specs = operand_specs(g, reverse=True)
    inputs = {name: (getattr(operands, name), specs[SPEC_NAMES[name]]) for name in present(Operands._fields[:8], g)}
    inputs["states"] = states, specs["states"]
    if d_o is not None:
        inputs["d_o"] = d_o, specs["value"]
    inputs["d_final"] = d_final, specs["state"]
    f32 = jnp.float32
    per_head = jax.ShapeDtypeStruct((g.batch, g.groups, g.group, g.key_width), f32)
    outputs = {
        f"d_{name}": (specs[SPEC_NAMES[name]], jax.ShapeDtypeStruct(x.shape, x.dtype))
        for name, (x, _) in inputs.items()
        if name in ("q", "k", "v", "gate", "beta")
    }
    outputs |= {"d_slope": (specs["d_heads"], per_head), "d_bias": (specs["d_heads"], per_head)}
    outputs["d_initial"] = specs["state"], jax.ShapeDtypeStruct(d_final.shape, f32)
    results = pl.pallas_call(
        partial(_body, names=[*inputs, *outputs, "carried", "inner"], geometry=g),
        grid=g.grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for spec, _ in outputs.values()],
        out_shape=[shape for _, shape in outputs.values()],
        scratch_shapes=[
            pltpu.VMEM((g.group, g.state_rows, g.key_width), f32),
            pltpu.VMEM((g.abreast(BACKWARD_ABREAST), g.chunks_per_block, g.state_rows, g.key_width), f32),
        ],
        compiler_params=g.compiler_params,
        interpret=g.interpret,
        name="kda_backward",
    )(*(x for x, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))
