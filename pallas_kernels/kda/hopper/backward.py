"""KDA's backward pass on Hopper: `prepare` and `recurrence` again, then `reverse_recurrence` and `input_gradients`.

Legend: B batch, T tokens, H heads, K key channels, V value channels. Only the inputs are kept from the forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda.hopper.forward import Padded, identities, pad_to, padded, padded_state
from pallas_kernels.kda.hopper.gradients import input_gradients
from pallas_kernels.kda.hopper.recurrence import recurrence
from pallas_kernels.kda.hopper.reverse import reverse_recurrence


def kda_backward(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    initial_state_BHKV: jax.Array | None,
    d_o_BTHV: jax.Array,
    d_final_BHKV: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    interpret=None,
) -> tuple[Any, ...]:
    """Gradients of the first eight arguments, in their dtypes, from those of the outputs and the final state.

    Without an initial state the walk starts at zero, and its gradient is None.
    """
    raw = q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV
    num_tokens, k_width, v_width = q_BTHK.shape[1], q_BTHK.shape[3], v_BTHV.shape[3]
    scale = k_width**-0.5
    inputs = padded(*raw, segment_ids_BT)
    d_o_BTHV = pad_to(d_o_BTHV.astype(jnp.bfloat16), dict(enumerate(inputs.v_BTHV.shape)))
    d_r_BTHV, d_state_BHVK, d_q_BTHK, d_k_BTHK, d_gate_BTHK, d_beta_BHT = _padded_gradients(
        inputs, d_o_BTHV, padded_state(d_final_BHKV), lower_bound=lower_bound, scale=scale, interpret=interpret
    )

    def cut(x, width):
        return x[:, :num_tokens, :, :width]

    d_gate_BTHK = cut(d_gate_BTHK, k_width)
    # The sums below read the rounded gradient: its errors are independent, the sums' are smaller.
    d_gate = d_gate_BTHK.astype(jnp.float32)
    shifted = gate_BTHK.astype(jnp.float32) + dt_bias_HK.astype(jnp.float32)
    beta_logits = beta_BTH.astype(jnp.float32)
    d_beta_BTH = d_beta_BHT.transpose(0, 2, 1)[:, :num_tokens]
    gradients = (
        cut(d_q_BTHK, k_width),
        cut(d_k_BTHK, k_width),
        cut(d_r_BTHV, v_width),
        d_gate_BTHK,
        jnp.where(d_beta_BTH == 0, 0, d_beta_BTH * jnp.exp(-beta_logits)),  # (1 - beta) / beta, precise at both ends
        jnp.sum(d_gate * shifted, axis=(0, 1, 3)),
        jnp.sum(d_gate, axis=(0, 1)),
        d_state_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3),
    )
    return tuple(None if x is None else gradient.astype(x.dtype) for gradient, x in zip(gradients, raw, strict=True))


def kda_transition_backward(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    d_transition_BHKK: jax.Array,
    d_zero_start_BHKV: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, ...]:
    """Gradients of the first six arguments, in their dtypes: those of two walks whose outputs nobody reads, summed."""
    batch, _, num_heads, k_width = k_BTHK.shape
    zero_values_BTHK = jnp.zeros_like(k_BTHK)
    walks = (
        (v_BTHV, jnp.zeros(d_zero_start_BHKV.shape, jnp.float32), d_zero_start_BHKV),
        (zero_values_BTHK, identities(batch, num_heads, k_width), d_transition_BHKK),
    )
    (_, d_k, d_v, *rest, _), (_, d_k_again, _, *rest_again, _) = (
        kda_backward(
            k_BTHK, k_BTHK, values, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, start, jnp.zeros_like(values), d_final,
            lower_bound=lower_bound, segment_ids_BT=segment_ids_BT, interpret=interpret,
        )
        for values, start, d_final in walks
    )  # fmt: skip
    return d_k + d_k_again, d_v, *(a + b for a, b in zip(rest, rest_again, strict=True))


def _padded_gradients(inputs: Padded, d_o_BTHV, d_final_BHVK, *, lower_bound: float, scale: float, interpret):
    """Gradients of values, state, q, k, gate, and the step size's sums, all padded."""
    operands = inputs.operands(lower_bound=lower_bound, scale=scale, interpret=interpret)
    d_r_BTHV, d_state_BHVK, d_states = reverse_recurrence(operands, d_o_BTHV, d_final_BHVK, interpret=interpret)
    # One after the other: what only the first needs is free before the second's results need room.
    operands, d_states = jax.lax.optimization_barrier((operands, d_states))
    u_BTHV, _, states = recurrence(operands, inputs.v_BTHV, inputs.state_BHVK, keep_states=True, interpret=interpret)
    gradients = input_gradients(
        inputs.q_BTHK, inputs.k_BTHK, inputs.gate_BTHK, inputs.affine_H2K, inputs.run_BT,
        u_BTHV, d_r_BTHV, d_o_BTHV, states, d_states, operands["decay"],
        lower_bound=lower_bound, scale=scale, interpret=interpret,
    )  # fmt: skip
    return d_r_BTHV, d_state_BHVK, *gradients
