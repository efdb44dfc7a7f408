"""KDA's forward kernel on TPU: raw inputs to outputs in one pass over HBM.

B batch, T tokens, H heads, P head groups of G heads, N blocks of tokens, C tokens of a chunk, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.blocks import FORWARD_ABREAST, Geometry, operand_specs
from pallas_kernels.kda.tpu.chunk import Packing, Raw, chunk_step, unpack


class Operands(NamedTuple):
    """Inputs as the kernels read them; heads are joined with channels, states transposed. `q` is None in a transition.

    q, k, gate [B, T, H K]; v [B, T, H V]; the rest is float32: beta [B, P, chunks, G, C]; slope, bias [P, G, K]; code [B, 1, T] (see
    `chunk.unpack`) or None; state [B, H, V, K].
    """

    q: jax.Array | None
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    beta: jax.Array
    slope: jax.Array
    bias: jax.Array
    code: jax.Array | None
    state: jax.Array


SPEC_NAMES = dict(zip(Operands._fields, ("key", "key", "value", "key", "beta", "heads", "heads", "code", "state"), strict=True))


def present(names: tuple[str, ...], geometry: Geometry) -> list[str]:
    """The names of a tuple like `Operands` that this call has."""
    absent = {name for name, missing in (("q", geometry.transition), ("code", not geometry.packed)) if missing}
    return [name for name in names if name not in absent]


def load_tokens(ref: Any, geometry: Geometry, head: jax.Array, chunk: jax.Array, block: jax.Array) -> jax.Array:
    """One head's chunk of a [1, block, G width] reference as float32; tokens after the row's end are zero, whatever lies there."""
    g, width = geometry, ref.shape[-1] // geometry.group
    rows = pl.ds(pl.multiple_of(chunk * g.chunk, g.chunk), g.chunk)
    x = ref[0, rows, pl.ds(pl.multiple_of(head * width, width), width)].astype(jnp.float32)
    if g.tokens % g.block == 0:
        return x
    left = g.tokens - block * g.block - chunk * g.chunk
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < left, x, 0.0)


def load_raw(refs: dict[str, Any], geometry: Geometry, head: jax.Array, chunk: jax.Array, block: jax.Array) -> Raw:
    """One head's chunk of inputs."""

    def tokens(name: str) -> jax.Array:
        return load_tokens(refs[name], geometry, head, chunk, block)

    return Raw(
        q_CK=None if geometry.transition else tokens("q"),
        k_CK=tokens("k"),
        v_CV=tokens("v"),
        gate_CK=tokens("gate"),
        beta_1C=refs["beta"][0, 0, chunk, pl.ds(head, 1), :],
        slope_1K=refs["slope"][0, pl.ds(head, 1), :],
        bias_1K=refs["bias"][0, pl.ds(head, 1), :],
    )


def load_packing(refs: dict[str, Any], geometry: Geometry, chunk: jax.Array) -> Packing | None:
    """The chunk's documents. A row that ends inside a block is packed, too: the rest of the block is padding."""
    if not geometry.packed:
        return None
    return unpack(refs["code"][0, :, pl.ds(pl.multiple_of(chunk * geometry.chunk, geometry.chunk), geometry.chunk)])


def _body(*all_refs, names: list[str], geometry: Geometry) -> None:
    refs, g = dict(zip(names, all_refs, strict=True)), geometry
    block, abreast = pl.program_id(2), g.abreast(FORWARD_ABREAST)
    carried = refs["carried"]

    @pl.when(block == 0)
    def _():
        carried[...] = refs["state"][0]

    if "states" in refs:
        refs["states"][0, 0] = carried[...]

    @pl.loop(0, g.chunks_per_block)
    def _(chunk):
        packing = load_packing(refs, g, chunk)
        rows = pl.ds(pl.multiple_of(chunk * g.chunk, g.chunk), g.chunk)

        @pl.loop(0, g.group // abreast)
        def _(step):
            heads = [step * abreast + i for i in range(abreast)]
            raws = [load_raw(refs, g, head, chunk, block) for head in heads]
            outputs, states = chunk_step(g.arithmetic, packing, raws, [carried[head] for head in heads])
            for head, state_VK in zip(heads, states, strict=True):
                carried[head] = state_VK
            for head, o_CV in zip(heads, outputs, strict=not g.transition):
                columns = pl.ds(pl.multiple_of(head * g.value_width, g.value_width), g.value_width)
                refs["o"][0, rows, columns] = o_CV.astype(refs["o"].dtype)

    @pl.when(block == g.blocks - 1)
    def _():
        refs["final"][0] = carried[...]


def forward(geometry: Geometry, operands: Operands, *, keep_states: bool) -> dict[str, jax.Array]:
    """`o` [B, T, H V] in v's dtype (not in a transition), `final` [B, H, V, K]; on request `states` [B, N, H, V, K] before each block."""
    g = geometry
    specs = operand_specs(g, reverse=False)
    inputs = present(Operands._fields, g)
    f32 = jnp.float32
    outputs = {
        "o": ("value", jax.ShapeDtypeStruct(operands.v.shape, operands.v.dtype)),
        "final": ("state", jax.ShapeDtypeStruct((g.batch, g.heads, g.state_rows, g.key_width), f32)),
        "states": ("states", jax.ShapeDtypeStruct((g.batch, g.blocks, g.heads, g.state_rows, g.key_width), f32)),
    }
    if g.transition:
        del outputs["o"]
    if not keep_states:
        del outputs["states"]
    results = pl.pallas_call(
        partial(_body, names=[*inputs, *outputs, "carried"], geometry=g),
        grid=g.grid,
        in_specs=[specs[SPEC_NAMES[name]] for name in inputs],
        out_specs=[specs[spec] for spec, _ in outputs.values()],
        out_shape=[shape for _, shape in outputs.values()],
        scratch_shapes=[pltpu.VMEM((g.group, g.state_rows, g.key_width), f32)],
        compiler_params=g.compiler_params,
        interpret=g.interpret,
        name="kda_forward",
    )(*(getattr(operands, name) for name in inputs))
    return dict(zip(outputs, results, strict=True))
