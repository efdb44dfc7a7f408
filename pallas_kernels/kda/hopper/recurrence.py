"""The head-parallel half of chunked KDA on Hopper: the state's walk over the chunks.

Legend: B batch, T tokens, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels, V = 128 value channels.

A warpgroup owns 64 value channels of a head and never speaks to another one; a block holds both of a head, or, when heads are few,
one. One more warpgroup loads. The state is held transposed, [V, K], in FP32 registers: then every product of the chain takes its
left operand from registers, and nothing of it passes through shared memory:

    R' = V' - S' Kg'      (V' comes in through a product with the identity, which transposes it)
    U' = R' X'            X = (I + L)^-1 diag(beta)
    O' = S' Qg' + U' A'
    S' = S' diag(decay) + U' Kd
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.hopper.mma import COLUMN, WGMMA, matmuls, tile, zeros

CHUNK = 64
WIDTH = 128
STAGES = 2
HALF = 64  # value channels of one warpgroup
MULTIPROCESSORS = 132


def compute_warpgroups(heads_and_rows: int) -> int:
    """Warpgroups that compute in a block: one while all blocks still run at once, else two, which load the operands once."""
    return 1 if 2 * heads_and_rows <= MULTIPROCESSORS else 2


def loader(fetch, free, num_chunks: int, interpret: bool):
    """The loading warpgroup's program: `fetch(step, slot)` for every step, STAGES ahead of those who free the slots."""
    if not interpret:
        plgpu.set_max_registers(40, action="decrease")
    for step in range(min(STAGES, num_chunks)):
        fetch(step, step)

    @pl.loop(STAGES, num_chunks)
    def _step(step):
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(free.at[slot])
        fetch(step, slot)

    for step in range(max(0, num_chunks - STAGES), num_chunks):  # every completed phase is observed
        plgpu.barrier_wait(free.at[step % STAGES])


def _body(
    kg_ref, qg_ref, kd_ref, ax_ref, decay_ref, v_ref, *rest,
    num_chunks: int, computing: int, from_zero: bool, keep_states: bool, interpret: bool,
):  # fmt: skip
    s0_ref, o_ref, s_ref, *rest = (None, *rest) if from_zero else rest
    if keep_states:
        states_ref, kg_s, kd_s, ax_s, decay_s, v_s, eye_s, out_s, states_s, full, free = rest
    else:
        kg_s, kd_s, ax_s, decay_s, v_s, eye_s, out_s, qg_s, full, free = rest
    part, h, b, wg = (lax.axis_index(name) for name in ("parts", "heads", "batch", "wg"))
    wide = pl.ds(part * computing * HALF, computing * HALF)  # value channels of the block

    def fetch(n, slot):
        copies = [(kg_ref, kg_s), (kd_ref, kd_s), (decay_ref, decay_s)] + ([] if keep_states else [(qg_ref, qg_s)])
        for ref, dst in copies:
            plgpu.copy_gmem_to_smem(ref.at[b, h, n], dst.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(ax_ref.at[b, h, n], ax_s.at[pl.ds(3 * slot, 3)], full.at[slot])
        plgpu.copy_gmem_to_smem(v_ref.at[b, pl.ds(n * CHUNK, CHUNK), h, wide], v_s.at[slot], full.at[slot])

    @pl.when(wg == computing)
    def _load():
        loader(fetch, free, num_chunks, interpret)

    @pl.when(wg < computing)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(232, action="increase")
        mine = pl.ds((part * computing + wg) * HALF, HALF)
        rows = plgpu.broadcasted_iota(jnp.int32, (HALF, CHUNK), 0, layout=WGMMA)
        columns = plgpu.broadcasted_iota(jnp.int32, (HALF, CHUNK), 1, layout=WGMMA)
        eye = eye_s.at[wg]
        eye[...] = jnp.where(rows == columns, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        state = zeros(HALF, WIDTH) if s0_ref is None else plgpu.load(s0_ref.at[b, h, mine], layout=WGMMA, optimized=False)

        def step(n, state):
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(full.at[slot])
            s_16 = state.astype(jnp.bfloat16)
            values = v_s.at[slot, :, pl.ds(wg * HALF, HALF)].transpose((1, 0))
            reads = [(zeros(HALF, CHUNK), [(values, eye), (s_16, kg_s.at[slot].transpose((1, 0)))])]  # kg holds -Kg
            if not keep_states:
                reads.append((zeros(HALF, CHUNK), [(s_16, qg_s.at[slot].transpose((1, 0)))]))
            r, *o = matmuls(reads, interpret)
            r_16 = r.astype(jnp.bfloat16)
            [u] = matmuls([(zeros(HALF, CHUNK), [(r_16, ax_s.at[3 * slot + i].transpose((1, 0))) for i in (1, 2)])], interpret)
            u_16 = u.astype(jnp.bfloat16)
            decay = plgpu.load(decay_s.at[slot], layout=COLUMN)
            state = state * lax.broadcast_in_dim(decay, state.shape, [1])
            writes = [(state, [(u_16, kd_s.at[slot])])]
            if not keep_states:
                writes.append((o[0], [(u_16, ax_s.at[3 * slot].transpose((1, 0)))]))
            state, *o = matmuls(writes, interpret)
            plgpu.barrier_arrive(free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s.at[wg].transpose((1, 0))[...] = u_16 if keep_states else o[0].astype(out_s.dtype)
            if keep_states:
                states_s.at[wg][...] = s_16
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[wg], o_ref.at[b, pl.ds(n * CHUNK, CHUNK), h, mine])
            if keep_states:
                plgpu.copy_smem_to_gmem(states_s.at[wg], states_ref.at[b, h, n, mine])
            return state

        state = lax.fori_loop(0, num_chunks, step, state)
        s_ref.at[b, h, mine][...] = state
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("keep_states", "interpret"))  # lowered once for all the layers that call it
def recurrence(
    operands: Mapping[Any, jax.Array], v_BTHV: jax.Array, state_BHVK: jax.Array | None, *, keep_states: bool = False, interpret=None
) -> tuple[jax.Array, ...]:
    """Outputs [B, T, H, V] and the final state [B, H, V, K] (FP32) from the chunk operands of `prepare` and the first state, None for zero.

    With `keep_states` the first is U instead, and the state before each chunk follows, [B, H, N, V, K] in bf16: what the backward
    pass needs.
    """
    batch, num_tokens, num_heads, _ = v_BTHV.shape
    num_chunks = num_tokens // CHUNK
    computing = compute_warpgroups(batch * num_heads)
    bf16 = jnp.bfloat16
    wide, block = (STAGES, CHUNK, WIDTH), (computing, CHUNK, CHUNK)
    outputs = [jax.ShapeDtypeStruct(v_BTHV.shape, bf16), jax.ShapeDtypeStruct((batch, num_heads, WIDTH, WIDTH), jnp.float32)]
    if keep_states:
        outputs.append(jax.ShapeDtypeStruct((batch, num_heads, num_chunks, WIDTH, WIDTH), bf16))
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            num_chunks=num_chunks,
            computing=computing,
            from_zero=state_BHVK is None,
            keep_states=keep_states,
            interpret=interpret is not None,
        ),
        out_type=tuple(outputs),
        scratch_types=(
            tile(wide, bf16),
            tile(wide, bf16),
            tile((STAGES * 3, CHUNK, CHUNK), bf16),
            plgpu.SMEM((STAGES, WIDTH), jnp.float32),
            tile((STAGES, CHUNK, computing * HALF), bf16),
            tile(block, bf16),
            tile(block, bf16),
            tile((computing, HALF, WIDTH), bf16) if keep_states else tile(wide, bf16),
            plgpu.Barrier(num_arrivals=5 if keep_states else 6, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=computing, num_barriers=STAGES),
        ),
        grid=(2 // computing, num_heads, batch),
        grid_names=("parts", "heads", "batch"),
        num_threads=computing + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    given = [*(operands[name] for name in ("kg", "qg", "kd", "ax", "decay")), v_BTHV]
    return tuple(kernel(*given, *(() if state_BHVK is None else (state_BHVK,))))
