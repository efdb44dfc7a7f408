"""KDA's forward pass on Hopper: raw inputs to outputs by `prepare` (token-parallel) and `recurrence` (head-parallel).

Legend: B batch, T tokens, H heads, K key channels, V value channels, N chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.hopper.prepare import CHUNK, WIDTH, prepare
from pallas_kernels.kda.hopper.recurrence import recurrence
from pallas_kernels.kda.inputs import number_documents, sigmoid


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
    """`slope` [H] and `shift` [H, K], FP32: 2^(gate slope + shift) is exp of minus the gate's sigmoid argument."""
    slope_H = -math.log2(math.e) * jnp.exp(a_log_H.astype(jnp.float32))
    return slope_H, slope_H[:, None] * dt_bias_HK.astype(jnp.float32)


def pad_to(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Zeros after the end of the named axes, up to the given sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


class Padded(NamedTuple):
    """The inputs as the kernels take them: whole chunks, WIDTH channels.

    `beta_BHT` is the step size, 0 at padding; `runs` is None or the pair of `chunk_runs`; the state is transposed, FP32.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    gate_BTHK: jax.Array
    beta_BHT: jax.Array
    slope_H: jax.Array
    shift_HK: jax.Array
    runs: tuple[jax.Array, jax.Array] | None
    state_BHVK: jax.Array

    def operands(self, *, lower_bound: float, scale: float, interpret) -> dict[str, jax.Array]:
        """The chunk operands."""
        inputs = self.q_BTHK, self.k_BTHK, self.gate_BTHK, self.beta_BHT, self.slope_H, self.shift_HK, self.runs
        operands = prepare(*inputs, lower_bound=lower_bound, scale=scale, interpret=interpret)
        return {str(name): array for name, array in operands.items()}


def padded(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV, segment_ids_BT) -> Padded:
    """Zeros after the end of the tokens and channels; the added tokens are padding in the documents' sense."""
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    padded_tokens = -(-num_tokens // CHUNK) * CHUNK
    if padded_tokens != num_tokens:
        if segment_ids_BT is None:
            segment_ids_BT = jnp.zeros((batch, num_tokens), jnp.int32)
        segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, padded_tokens - num_tokens)), constant_values=-1)
    wide = {1: padded_tokens, 3: WIDTH}
    if initial_state_BHKV is None:
        state_BHVK = jnp.zeros((batch, num_heads, WIDTH, WIDTH), jnp.float32)
    else:
        state_BHVK = padded_state(initial_state_BHKV)
    beta_BTH = pad_to(sigmoid(beta_BTH.astype(jnp.float32)), {1: padded_tokens})
    if segment_ids_BT is not None:
        beta_BTH = jnp.where(segment_ids_BT[..., None] >= 0, beta_BTH, 0)
    slope_H, shift_HK = gate_affine(a_log_H, pad_to(dt_bias_HK, {1: WIDTH}))
    return Padded(
        pad_to(q_BTHK, wide),
        pad_to(k_BTHK, wide),
        pad_to(v_BTHV, wide),
        pad_to(gate_BTHK, wide),
        beta_BTH.transpose(0, 2, 1),
        slope_H,
        shift_HK,
        None if segment_ids_BT is None else chunk_runs(segment_ids_BT),
        state_BHVK,
    )


def padded_state(state_BHKV: jax.Array) -> jax.Array:
    """A state or its gradient as the kernels take it: transposed, FP32, WIDTH channels."""
    return pad_to(state_BHKV.astype(jnp.float32).swapaxes(2, 3), {2: WIDTH, 3: WIDTH})


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
    inputs = padded(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV, segment_ids_BT)
    num_tokens, k_width, v_width = q_BTHK.shape[1], q_BTHK.shape[3], v_BTHV.shape[3]
    operands = inputs.operands(lower_bound=lower_bound, scale=k_width**-0.5, interpret=interpret)
    o_BTHV, state_BHVK = recurrence(operands, inputs.v_BTHV, inputs.state_BHVK, interpret=interpret)
    return o_BTHV[:, :num_tokens, :, :v_width], state_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3)


def kda_transition_forward(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """(M_BHKK, S_zero_start_BHKV) in FP32: the final states of the identity without values, and of zero with them."""
    batch, _, num_heads, k_width = k_BTHK.shape
    v_width = v_BTHV.shape[3]
    # Queries move no state; their place is filled and their products are dropped.
    inputs = padded(k_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, None, segment_ids_BT)
    operands = inputs.operands(lower_bound=lower_bound, scale=k_width**-0.5, interpret=interpret)
    _, zero_start_BHVK = recurrence(operands, inputs.v_BTHV, inputs.state_BHVK, interpret=interpret)
    identity_BHKK = padded_state(identities(batch, num_heads, k_width))
    _, transition_BHKK = recurrence(operands, jnp.zeros_like(inputs.v_BTHV), identity_BHKK, interpret=interpret)
    return (
        transition_BHKK[:, :, :k_width, :k_width].swapaxes(2, 3),
        zero_start_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3),
    )


def identities(batch: int, num_heads: int, width: int) -> jax.Array:
    """One identity matrix per row and head, FP32."""
    return jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (batch, num_heads, width, width))
