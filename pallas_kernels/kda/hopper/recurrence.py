"""The head-parallel half of chunked KDA on Hopper: the state's walk over the chunks.

Legend: B batch, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels, V = 128 value channels.

One block per (head, batch row). Two warpgroups own 64 value channels each and never speak to each other; a third one loads.
The state is held transposed, [V, K], in FP32 registers: then every product of the chain takes its left operand from
registers, and nothing of it passes through shared memory:

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


def _body(
    kg_ref, qg_ref, kd_ref, ax_ref, decay_ref, v_ref, s0_ref,
    o_ref, s_ref,
    kg_s, qg_s, kd_s, ax_s, decay_s, v_s, eye_s, out_s, full, free,
    *, num_chunks: int, interpret: bool,
):  # fmt: skip
    h, b, wg = lax.axis_index("heads"), lax.axis_index("batch"), lax.axis_index("wg")

    def fetch(n, slot):
        for ref, dst in ((kg_ref, kg_s), (qg_ref, qg_s), (kd_ref, kd_s), (decay_ref, decay_s)):
            plgpu.copy_gmem_to_smem(ref.at[b, h, n], dst.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(ax_ref.at[b, h, n], ax_s.at[pl.ds(3 * slot, 3)], full.at[slot])
        plgpu.copy_gmem_to_smem(v_ref.at[b, pl.ds(n * CHUNK, CHUNK), h], v_s.at[slot], full.at[slot])

    @pl.when(wg == 2)
    def _load():
        if not interpret:
            plgpu.set_max_registers(40, action="decrease")
        for n in range(min(STAGES, num_chunks)):
            fetch(n, n)

        @pl.loop(STAGES, num_chunks)
        def _step(n):
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(free.at[slot])
            fetch(n, slot)

        for n in range(max(0, num_chunks - STAGES), num_chunks):  # every completed phase is observed
            plgpu.barrier_wait(free.at[n % STAGES])

    @pl.when(wg < 2)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(wg * HALF, HALF)
        rows = plgpu.broadcasted_iota(jnp.int32, (HALF, CHUNK), 0, layout=WGMMA)
        columns = plgpu.broadcasted_iota(jnp.int32, (HALF, CHUNK), 1, layout=WGMMA)
        eye = eye_s.at[wg]
        eye[...] = jnp.where(rows == columns, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        state = plgpu.load(s0_ref.at[b, h, mine], layout=WGMMA, optimized=False)

        def step(n, state):
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(full.at[slot])
            s_16 = state.astype(jnp.bfloat16)
            values = v_s.at[slot, :, mine].transpose((1, 0))
            r, o = matmuls(
                [
                    (zeros(HALF, CHUNK), [(values, eye), (s_16, kg_s.at[slot].transpose((1, 0)))]),  # kg holds -Kg
                    (zeros(HALF, CHUNK), [(s_16, qg_s.at[slot].transpose((1, 0)))]),
                ],
                interpret,
            )
            r_16 = r.astype(jnp.bfloat16)
            [u] = matmuls([(zeros(HALF, CHUNK), [(r_16, ax_s.at[3 * slot + i].transpose((1, 0))) for i in (1, 2)])], interpret)
            u_16 = u.astype(jnp.bfloat16)
            decay = plgpu.load(decay_s.at[slot], layout=COLUMN)
            state = state * lax.broadcast_in_dim(decay, state.shape, [1])
            state, o = matmuls(
                [(state, [(u_16, kd_s.at[slot])]), (o, [(u_16, ax_s.at[3 * slot].transpose((1, 0)))])],
                interpret,
            )
            plgpu.barrier_arrive(free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s.at[wg].transpose((1, 0))[...] = o.astype(out_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[wg], o_ref.at[b, pl.ds(n * CHUNK, CHUNK), h, mine])
            return state

        state = lax.fori_loop(0, num_chunks, step, state)
        s_ref.at[b, h, mine][...] = state
        plgpu.wait_smem_to_gmem(0)


def recurrence(operands: Mapping[Any, jax.Array], v_BTHV: jax.Array, state_BHVK: jax.Array, *, interpret=None):
    """Outputs [B, T, H, V] and the final state [B, H, V, K] (FP32) from the chunk operands of `prepare`."""
    batch, num_tokens, num_heads, _ = v_BTHV.shape
    num_chunks = num_tokens // CHUNK
    bf16 = jnp.bfloat16
    kernel = plgpu.kernel(
        functools.partial(_body, num_chunks=num_chunks, interpret=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct(v_BTHV.shape, bf16),
            jax.ShapeDtypeStruct(state_BHVK.shape, jnp.float32),
        ),
        scratch_types=(
            tile((STAGES, CHUNK, WIDTH), bf16),
            tile((STAGES, CHUNK, WIDTH), bf16),
            tile((STAGES, CHUNK, WIDTH), bf16),
            tile((STAGES * 3, CHUNK, CHUNK), bf16),
            plgpu.SMEM((STAGES, WIDTH), jnp.float32),
            tile((STAGES, CHUNK, WIDTH), bf16),
            tile((2, CHUNK, CHUNK), bf16),
            tile((2, CHUNK, HALF), bf16),
            plgpu.Barrier(num_arrivals=6, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        grid=(num_heads, batch),
        grid_names=("heads", "batch"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(*(operands[name] for name in ("kg", "qg", "kd", "ax", "decay")), v_BTHV, state_BHVK)
