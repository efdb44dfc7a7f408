"""The backward pass's walk over the chunks, from the last to the first: the gradient of the state.

Legend: B batch, T tokens, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels, V = 128 value channels.

The warpgroups, the ring and the transposed state are those of `recurrence`. With D the gradient of the state after a chunk and dO that
of the outputs, in the notation there:

    dU' = dO' A + D' Kd'
    dR' = dU' X           the gradient of the values, too
    D'  = D' diag(decay) + dO' Qg - dR' Kg
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
from pallas_kernels.kda.hopper.recurrence import CHUNK, HALF, STAGES, WIDTH, compute_warpgroups, loader


def _body(
    kg_ref, qg_ref, kd_ref, ax_ref, decay_ref, d_o_ref, d_last_ref,
    d_v_ref, d_first_ref, d_states_ref,
    kg_s, qg_s, kd_s, ax_s, decay_s, d_o_s, d_v_s, d_states_s, full, free,
    *, num_chunks: int, computing: int, interpret: bool,
):  # fmt: skip
    part, h, b, wg = (lax.axis_index(name) for name in ("parts", "heads", "batch", "wg"))
    wide = pl.ds(part * computing * HALF, computing * HALF)  # value channels of the block

    def fetch(step, slot):
        n = num_chunks - 1 - step
        for ref, dst in ((kg_ref, kg_s), (qg_ref, qg_s), (kd_ref, kd_s), (decay_ref, decay_s)):
            plgpu.copy_gmem_to_smem(ref.at[b, h, n], dst.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(ax_ref.at[b, h, n], ax_s.at[pl.ds(3 * slot, 3)], full.at[slot])
        plgpu.copy_gmem_to_smem(d_o_ref.at[b, pl.ds(n * CHUNK, CHUNK), h, wide], d_o_s.at[slot], full.at[slot])

    @pl.when(wg == computing)
    def _load():
        loader(fetch, free, num_chunks, interpret)

    @pl.when(wg < computing)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(232, action="increase")
        mine = pl.ds((part * computing + wg) * HALF, HALF)
        state = plgpu.load(d_last_ref.at[b, h, mine], layout=WGMMA, optimized=False)

        def step(i, state):
            n = num_chunks - 1 - i
            slot = lax.rem(i, STAGES)
            plgpu.barrier_wait(full.at[slot])
            s_16 = state.astype(jnp.bfloat16)
            d_o = d_o_s.at[slot, :, pl.ds(wg * HALF, HALF)].transpose((1, 0))
            decay = plgpu.load(decay_s.at[slot], layout=COLUMN)
            u, state = matmuls(
                [
                    (zeros(HALF, CHUNK), [(d_o, ax_s.at[3 * slot]), (s_16, kd_s.at[slot].transpose((1, 0)))]),
                    (state * lax.broadcast_in_dim(decay, state.shape, [1]), [(d_o, qg_s.at[slot])]),
                ],
                interpret,
            )
            u_16 = u.astype(jnp.bfloat16)
            [r] = matmuls([(zeros(HALF, CHUNK), [(u_16, ax_s.at[3 * slot + i]) for i in (1, 2)])], interpret)
            r_16 = r.astype(jnp.bfloat16)
            [state] = matmuls([(state, [(r_16, kg_s.at[slot])])], interpret)  # kg holds -Kg
            plgpu.barrier_arrive(free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            d_v_s.at[wg].transpose((1, 0))[...] = r_16
            d_states_s.at[wg][...] = s_16
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(d_v_s.at[wg], d_v_ref.at[b, pl.ds(n * CHUNK, CHUNK), h, mine])
            plgpu.copy_smem_to_gmem(d_states_s.at[wg], d_states_ref.at[b, h, n, mine])
            return state

        state = lax.fori_loop(0, num_chunks, step, state)
        d_first_ref.at[b, h, mine][...] = state
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("interpret",))  # lowered once for all the layers that call it
def reverse_recurrence(operands: Mapping[Any, jax.Array], d_o_BTHV: jax.Array, d_state_BHVK: jax.Array, *, interpret=None):
    """Gradients of values and state from those of outputs (bf16) and final state (FP32) and the operands of `prepare`.

    Returns the gradient of the values [B, T, H, V] (bf16), of the initial state [B, H, V, K] (FP32), and that of the state after
    each chunk [B, H, N, V, K] (bf16).
    """
    batch, num_tokens, num_heads, _ = d_o_BTHV.shape
    num_chunks = num_tokens // CHUNK
    computing = compute_warpgroups(batch * num_heads)
    bf16 = jnp.bfloat16
    wide = (STAGES, CHUNK, WIDTH)
    kernel = plgpu.kernel(
        functools.partial(_body, num_chunks=num_chunks, computing=computing, interpret=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct(d_o_BTHV.shape, bf16),
            jax.ShapeDtypeStruct(d_state_BHVK.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, num_chunks, WIDTH, WIDTH), bf16),
        ),
        scratch_types=(
            tile(wide, bf16),
            tile(wide, bf16),
            tile(wide, bf16),
            tile((STAGES * 3, CHUNK, CHUNK), bf16),
            plgpu.SMEM((STAGES, WIDTH), jnp.float32),
            tile((STAGES, CHUNK, computing * HALF), bf16),
            tile((computing, CHUNK, HALF), bf16),
            tile((computing, HALF, WIDTH), bf16),
            plgpu.Barrier(num_arrivals=6, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=computing, num_barriers=STAGES),
        ),
        grid=(2 // computing, num_heads, batch),
        grid_names=("parts", "heads", "batch"),
        num_threads=computing + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(*(operands[name] for name in ("kg", "qg", "kd", "ax", "decay")), d_o_BTHV, d_state_BHVK)
