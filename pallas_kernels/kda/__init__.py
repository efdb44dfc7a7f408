"""Kimi Delta Attention: one function, several forms that agree in values and gradients.

`recurrent` is the definition, `chunked` the XLA form to train with, `hopper` Mosaic GPU kernels and `tpu` Mosaic TPU kernels
for both passes.
 B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax

from pallas_kernels.kda.checks import check_arguments
from pallas_kernels.kda.chunked import chunk_transition, kda_chunked
from pallas_kernels.kda.recurrent import kda_recurrent
from pallas_kernels.target import target

__all__ = ["Implementation", "chunk_transition", "kda", "kda_transition"]

Implementation = Literal["recurrent", "chunked", "hopper", "tpu"]

_logger = logging.getLogger(__name__)


def kda(
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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention, report section 2.1 equations 1 to 6.

    Per head, with S the state [K, V], q and k divided by sqrt(sum x^2 + 1e-6), q then by sqrt(K), beta = sigmoid(beta logit) and
    log decay g = lower_bound * sigmoid(exp(a_log) * (gate + dt_bias)):

        S <- diag(exp(g)) S;    S <- S + beta k (v - S^T k)^T;    o = S^T q.

    Args:
        q_BTHK: queries, any floating dtype (as the other inputs); bf16 and float32 compute in float32, float64 in float64.
        k_BTHK: keys.
        v_BTHV: values.
        gate_BTHK: raw decay logits, before bias, scale and sigmoid.
        beta_BTH: raw step-size logits, before the sigmoid.
        a_log_H: log of each head's gate scale.
        dt_bias_HK: bias of the gate.
        lower_bound: the log decay's bound, in [-5, 0).
        segment_ids_BT: signed integers; documents >= 0, -1 is padding (no state update, zero output). The state restarts where the id
            differs from that of the real token before; padding in between does not count.
        initial_state_BHKV: state before the row's first document; zero if None.
        implementation: the form to use; None picks one and logs the choice once: `tpu` on TPUs for bf16 and float32 inputs, else
            `chunked`; inside a `shard_map` the mesh's devices count. `hopper` must be asked for: it needs JAX 0.11, a Hopper GPU,
            bf16 inputs and widths up to 128; its gradient in the present form has only been interpreted.

    Returns:
        The output o_BTHV in v's dtype, and the last real document's final state [B, H, K, V] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: an argument's shape, dtype or value does not fit; the message names it.
    """
    arguments = (q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK)
    check_arguments(*arguments, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT, initial_state_BHKV=initial_state_BHKV)
    if implementation is None:
        implementation = _choice(*arguments[:5])
    if implementation == "recurrent":
        form = kda_recurrent
    elif implementation == "chunked":
        form = kda_chunked
    elif implementation == "hopper":
        form = _hopper(*arguments[:4])
    elif implementation == "tpu":
        form = _tpu(*arguments[:5])
    else:
        raise ValueError(f'implementation must be "recurrent", "chunked", "hopper", "tpu" or None, got {implementation!r}')
    return form(*arguments, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT, initial_state_BHKV=initial_state_BHKV)


def kda_transition(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    implementation: Literal["chunked", "tpu"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What a stretch of tokens does to any incoming state, S_out = M S_in + S_zero_start: report section 5.1.2 equation 17.

    Arguments as in `kda`; None picks the form for the platform. Returns (M_BHKK, S_zero_start_BHKV) as `chunk_transition` does.

    Raises:
        ValueError: an argument's shape, dtype or value does not fit; the message names it.
    """
    arguments = (k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK)
    check_arguments(k_BTHK, *arguments, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT, initial_state_BHKV=None)
    if implementation is None:
        implementation = _choice(*arguments[:4])
    if implementation == "tpu":
        _tpu(*arguments[:4])
        from pallas_kernels.kda.tpu import transition_tpu as form
    elif implementation == "chunked":
        form = chunk_transition
    else:
        raise ValueError(f'implementation must be "chunked", "tpu" or None, got {implementation!r}')
    return form(*arguments, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT)


@functools.cache
def _choose(platform: str, reason: str | None) -> Literal["chunked", "tpu"]:
    """The form for a platform; `reason` is why its kernels do not apply. Cached, so that each choice is logged once."""
    if platform == "tpu" and reason is None:
        _logger.info("KDA on tpu: Mosaic kernels")
        return "tpu"
    if reason is not None:
        _logger.warning("KDA on %s falls back to the slower chunked form (XLA): %s", platform, reason)
    else:
        _logger.info("KDA on %s: chunked (XLA)", platform)
    return "chunked"


def _choice(*arrays: jax.Array) -> Literal["chunked", "tpu"]:
    platform = target().platform
    if platform != "tpu":
        return _choose(platform, None)
    from pallas_kernels.kda import tpu  # only where it is used: its imports take time

    return _choose(platform, tpu.unsupported_reason(*arrays))


def _tpu(*arrays: jax.Array) -> Callable[..., tuple[jax.Array, jax.Array]]:
    from pallas_kernels.kda import tpu

    reason = tpu.unsupported_reason(*arrays)
    if reason is not None:
        raise ValueError(f'implementation "tpu" does not apply: {reason}')
    return tpu.kda_tpu


def _hopper(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHV: jax.Array, gate_BTHK: jax.Array) -> Callable[..., tuple[jax.Array, jax.Array]]:
    if jax.__version_info__ < (0, 11):
        raise ValueError(f'implementation "hopper" needs JAX 0.11 or newer, this is {jax.__version__}')
    from pallas_kernels.kda import hopper  # JAX 0.10 cannot import it

    reason = hopper.unsupported_reason(q_BTHK, k_BTHK, v_BTHV, gate_BTHK)
    if reason is not None:
        raise ValueError(f'implementation "hopper" does not apply: {reason}')
    return hopper.kda_hopper
