"""KDA on Hopper GPUs: Mosaic GPU kernels, forward and backward.

Legend: B batch, T tokens, H heads, K key channels, V value channels. Needs JAX >= 0.11.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.hopper.backward import kda_backward, kda_transition_backward
from pallas_kernels.kda.hopper.forward import kda_forward, kda_transition_forward
from pallas_kernels.kda.hopper.prepare import WIDTH

__all__ = ["kda_hopper", "transition_hopper", "unsupported_reason"]


class _Static(NamedTuple):
    """What is fixed at trace time (hashable)."""

    lower_bound: float
    interpret: Any


def unsupported_reason(*arrays: jax.Array) -> str | None:
    """Why these of q, k, v and gate cannot go through the kernels, or None if they can. Looks at shapes and dtypes only."""
    for array in arrays:
        if array.dtype != jnp.bfloat16:
            return f"an input is {array.dtype}, the kernels take bfloat16"
        if array.shape[-1] > WIDTH:
            return f"an input has {array.shape[-1]} channels per head, the kernels take at most {WIDTH}"
    return None


def kda_hopper(
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
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention by Mosaic GPU kernels, report section 2.1 equations 1 to 6.

    Arguments and results as in `pallas_kernels.kda.kda`; q, k, v and gate are bfloat16 and K, V <= 128. The backward pass keeps the
    inputs only. `interpret` is for tests without a GPU.

    Raises:
        ValueError: the kernels do not take these dtypes or widths.
    """
    reason = unsupported_reason(q_BTHK, k_BTHK, v_BTHV, gate_BTHK)
    if reason is not None:
        raise ValueError(f"KDA on Hopper: {reason}")
    inputs = (q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV)
    return _kda(_Static(float(lower_bound), interpret), segment_ids_BT, *inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static, segment_ids_BT, *inputs):
    *rest, initial_state_BHKV = inputs
    return kda_forward(*rest, initial_state_BHKV=initial_state_BHKV, segment_ids_BT=segment_ids_BT, **static._asdict())


def _kda_forward(static, segment_ids_BT, *inputs):
    return _kda(static, segment_ids_BT, *inputs), (segment_ids_BT, inputs)


def _kda_backward(static, residuals, cotangents):
    segment_ids_BT, inputs = residuals
    return None, *kda_backward(*inputs, *cotangents, segment_ids_BT=segment_ids_BT, **static._asdict())


_kda.defvjp(_kda_forward, _kda_backward)


def transition_hopper(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """What a stretch of tokens does to any incoming state, S_out = M S_in + S_zero_start: report section 5.1.2 equation 17.

    Arguments and results as in `pallas_kernels.kda.chunk_transition`: (M_BHKK, S_zero_start_BHKV), float32; k, v and gate are
    bfloat16 and K, V <= 128. Differentiable; the backward pass keeps the inputs only.

    Raises:
        ValueError: the kernels do not take these dtypes or widths.
    """
    reason = unsupported_reason(k_BTHK, v_BTHV, gate_BTHK)
    if reason is not None:
        raise ValueError(f"KDA on Hopper: {reason}")
    inputs = (k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK)
    return _transition(_Static(float(lower_bound), interpret), segment_ids_BT, *inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transition(static, segment_ids_BT, *inputs):
    return kda_transition_forward(*inputs, segment_ids_BT=segment_ids_BT, **static._asdict())


def _transition_forward(static, segment_ids_BT, *inputs):
    return _transition(static, segment_ids_BT, *inputs), (segment_ids_BT, inputs)


def _transition_backward(static, residuals, cotangents):
    segment_ids_BT, inputs = residuals
    return None, *kda_transition_backward(*inputs, *cotangents, segment_ids_BT=segment_ids_BT, **static._asdict())


_transition.defvjp(_transition_forward, _transition_backward)
