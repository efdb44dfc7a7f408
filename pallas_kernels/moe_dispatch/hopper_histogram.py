"""The router's histogram on Hopper (Mosaic GPU): counts in shared memory, where an addition costs a few cycles.

A block counts 32 experts over its part of the tokens, in 64-token tiles that each warpgroup fetches through a ring of its own. What the
parts counted is added up by XLA. Integers are added, so the counts do not depend on any order.

Shapes: S tokens, E experts, P parts of the tokens, B bins (padded to a multiple of 256).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.grouped_matmul.hopper_blocks import tiled, vary_like

TOKENS, EXPERTS = 64, 32  # of a tile
STAGES = 2
WARPGROUPS = 4
BLOCKS = 132
BOX = 256  # a side of a TMA box has at most as many elements
_TILE, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def refusal(scores_SE: jax.Array, bins: int) -> str | None:
    """Why the kernel does not take these scores (only shape and dtype are read), or None."""
    tokens, experts = scores_SE.shape
    if scores_SE.dtype != jnp.float32:
        return f"scores must be float32, not {scores_SE.dtype}"
    if tokens % TOKENS or experts % EXPERTS or not tokens or bins > 4 * BOX:
        return f"{tokens} tokens, {experts} experts and {bins} bins are not multiples of {TOKENS} and {EXPERTS}, and at most {4 * BOX}"
    return None


# Register by register, as no array operation scatters in shared memory, and Mosaic GPU's division is not IEEE's, which the counts need.
_COUNT = """{
.reg .pred number; .reg .f32 bin; .reg .s32 whole; .reg .u32 place;
setp.num.f32 number, $1, $1;
div.rn.f32 bin, $1, $2;
max.f32 bin, bin, 0f00000000;
min.f32 bin, bin, $3;
cvt.rzi.s32.f32 whole, bin;
mad.lo.u32 place, whole, 4, $0;
@number red.shared.add.u32 [place], 1;
}"""


def _count(counts_EQB, required_SE, width_SE, bins: int, interpret: bool) -> None:
    """Adds 1 to the count, in shared memory, of each expert's bin that holds `required`, but for NaN."""
    if interpret:
        place_SE = jnp.clip(required_SE / width_SE, 0, bins - 1).astype(jnp.int32)
        expert_SE = jnp.broadcast_to(jnp.arange(EXPERTS, dtype=jnp.int32), place_SE.shape)
        number_SE = (required_SE == required_SE).astype(jnp.int32)
        counts_EQB[...] = counts_EQB[...].at[expert_SE, place_SE // BOX, place_SE % BOX].add(number_SE)
        return

    def add_ones(context, counts_EQB, first_SE, required_SE, width_SE):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        base, last = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(counts_EQB)), arith.constant(f32, ir.FloatAttr.get(f32, bins - 1))
        for registers in zip(*(array.registers.flat for array in (first_SE, required_SE, width_SE)), strict=True):
            for lane in range(ir.VectorType(registers[0].type).shape[0]):
                first, required, width = (vector.extract(r, dynamic_position=[], static_position=[lane]) for r in registers)
                operands = [arith.addi(base, first), required, width, last]
                llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, _COUNT, "r,f,f,f", has_side_effects=True)

    expert_bytes = counts_EQB.shape[1] * BOX * 4
    first_SE = plgpu.broadcasted_iota(jnp.int32, required_SE.shape, 1, layout=_TILE) * expert_bytes
    inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE, _TILE, _TILE))(add_ones)
    inline(counts_EQB, first_SE, required_SE, width_SE)


def _kernel(scores_SE, cutoffs_S, range_2, counts_PEQB, scores, cutoffs, counts, loaded, counted, *, bins, parts, warpgroups, interpret):
    part, group, wg = lax.axis_index("part"), lax.axis_index("experts"), lax.axis_index("wg")
    worker, workers = part * warpgroups + wg, parts * warpgroups
    mine = lax.div(scores_SE.shape[0] // TOKENS - worker + (workers - 1), jnp.int32(workers))
    quarters, share = counts.shape[1], EXPERTS // warpgroups

    def load(turn):
        slot = wg * STAGES + lax.rem(turn, jnp.int32(STAGES))
        at_tokens = pl.ds(pl.multiple_of((worker + turn * workers) * TOKENS, TOKENS), TOKENS)
        at_experts = pl.ds(pl.multiple_of(group * EXPERTS, EXPERTS), EXPERTS)
        plgpu.copy_gmem_to_smem(scores_SE.at[at_tokens, at_experts], scores.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(cutoffs_S.at[at_tokens], cutoffs.at[slot], loaded.at[slot])

    def meet():
        plgpu.commit_smem()
        plgpu.barrier_arrive(counted)
        plgpu.barrier_wait(counted)

    for turn in range(STAGES):
        pl.when(turn < mine)(functools.partial(load, jnp.int32(turn)))
    for expert in range(share):
        zeros = plgpu.layout_cast(jnp.zeros((quarters, BOX), jnp.int32), plgpu.Layout.WG_STRIDED((quarters, BOX), vec_size=2))
        counts.at[wg * share + expert][...] = zeros
    meet()
    low, width = range_2[0], range_2[1]

    @pl.loop(jnp.int32(0), mine)
    def _tile(turn):
        slot = wg * STAGES + lax.rem(turn, jnp.int32(STAGES))
        plgpu.barrier_wait(loaded.at[slot])
        cutoff = plgpu.load(cutoffs.at[slot], layout=_ROW, optimized=False)
        score = plgpu.load(scores.at[slot], layout=_TILE)
        plgpu.commit_smem()  # every warp has read the tile
        pl.when(turn + STAGES < mine)(lambda: load(turn + STAGES))
        required = lax.broadcast_in_dim(cutoff, score.shape, (0,)) - score - low
        width_SE = plgpu.layout_cast(jnp.broadcast_to(width, score.shape), _TILE)
        _count(counts, required, width_SE, bins, interpret)

    meet()
    at_experts = pl.ds(group * EXPERTS + wg * share, share)
    plgpu.copy_smem_to_gmem(counts.at[pl.ds(wg * share, share)], counts_PEQB.at[part, at_experts])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("bins", "num_blocks", "interpret"))  # lowered once for all the layers that call it
def histogram(scores_SE, cutoffs_S, real_S, low, width, *, bins: int, num_blocks: int = BLOCKS, interpret=None) -> jax.Array:
    """See `router_histogram`. A pair without a value (NaN) is counted nowhere."""
    tokens, experts = scores_SE.shape
    parts, quarters = max(num_blocks * EXPERTS // experts, 1), pl.cdiv(bins, BOX)
    warpgroups = 1 if interpret else WARPGROUPS
    kernel = plgpu.kernel(
        functools.partial(_kernel, bins=bins, parts=parts, warpgroups=warpgroups, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((parts, experts, quarters, BOX), jnp.int32),
        scratch_types=(
            tiled((warpgroups * STAGES, TOKENS, EXPERTS), jnp.dtype(jnp.float32)),
            plgpu.SMEM((warpgroups * STAGES, TOKENS), jnp.float32),
            plgpu.SMEM((EXPERTS, quarters, BOX), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups * STAGES),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(parts, experts // EXPERTS),
        grid_names=("part", "experts"),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name="router_histogram",
        interpret=interpret,
    )
    range_2 = jnp.stack([jnp.asarray(low, jnp.float32), jnp.asarray(width, jnp.float32)])
    cutoffs_S = jnp.where(real_S, cutoffs_S.astype(jnp.float32), jnp.nan)
    counts_PEQB = vary_like(kernel(scores_SE, cutoffs_S, range_2), scores_SE)
    return jnp.sum(counts_PEQB, axis=0, dtype=jnp.int32).reshape(experts, -1)[:, :bins]
