"""KDA's forward pass on Hopper: raw inputs to outputs by `prepare` (token-parallel) and `recurrence` (head-parallel).

Legend: B batch, T tokens, H heads, K key channels, V value channels, N chunks.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.kda.hopper.prepare import CHUNK, WIDTH, prepare
from pallas_kernels.kda.hopper.recurrence import recurrence
from pallas_kernels.kda.inputs import number_documents


def chunk_runs(segment_ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Documents as the kernels read them, int32.

    `run_BT`: the document's number, or -1 - number at padding. `edge_B2N`: the number whose state enters a chunk, and the
    number whose state leaves it.
    """
    number_BT, real_BT = number_documents(segment_ids_BT)
    last_BN = number_BT[:, CHUNK - 1 :: CHUNK]
    first_BN = jnp.pad(last_BN[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(real_BT, number_BT, -1 - number_BT), jnp.stack([first_BN, last_BN], axis=1)


def gate_affine(a_log_H: jax.Array, dt_bias_HK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`slope`, `shift` [H, K], FP32: 2^(gate slope + shift) is exp of minus the gate's sigmoid argument."""
    slope_HK = jnp.broadcast_to(-math.log2(math.e) * jnp.exp(a_log_H.astype(jnp.float32))[:, None], dt_bias_HK.shape)
    return slope_HK, slope_HK * dt_bias_HK.astype(jnp.float32)


def pad_to(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Zeros after the end of the named axes, up to the given sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def kda_forward(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    initial_state_BHKV: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs (bf16) and final state (FP32) of KDA; q, k, v, gate are bf16, K and V at most 128, -5 <= lower_bound < 0.

    Report section 2.1, equations 1 to 6. See `pallas_kernels.kda.kda` for the meaning of the arguments.
    """
    batch, num_tokens, num_heads, k_width = q_BTHK.shape
    v_width = v_BTHV.shape[-1]
    padded_tokens = -(-num_tokens // CHUNK) * CHUNK
    if padded_tokens != num_tokens:
        if segment_ids_BT is None:
            segment_ids_BT = jnp.zeros((batch, num_tokens), jnp.int32)
        segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, padded_tokens - num_tokens)), constant_values=-1)
    wide = {1: padded_tokens, 3: WIDTH}
    if initial_state_BHKV is None:
        state_BHVK = jnp.zeros((batch, num_heads, WIDTH, WIDTH), jnp.float32)
    else:
        state_BHVK = pad_to(initial_state_BHKV.astype(jnp.float32).swapaxes(2, 3), {2: WIDTH, 3: WIDTH})
    slope_HK, shift_HK = gate_affine(a_log_H, pad_to(dt_bias_HK, {1: WIDTH}))
    operands = prepare(
        pad_to(q_BTHK, wide),
        pad_to(k_BTHK, wide),
        pad_to(gate_BTHK, wide),
        pad_to(beta_BTH.astype(jnp.float32).transpose(0, 2, 1), {2: padded_tokens}),
        slope_HK,
        shift_HK,
        None if segment_ids_BT is None else chunk_runs(segment_ids_BT),
        lower_bound=lower_bound,
        scale=k_width**-0.5,
        interpret=interpret,
    )
    o_BTHV, state_BHVK = recurrence(operands, pad_to(v_BTHV, wide), state_BHVK, interpret=interpret)
    return o_BTHV[:, :num_tokens, :, :v_width], state_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3)
