"""Kimi Delta Attention: one function, several forms that agree in values and gradients.

`recurrent` is the definition, `chunked` the XLA form to train with, `hopper` Mosaic GPU kernels and `tpu` Mosaic TPU kernels
for both passes.
 B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import jax

from pallas_kernels.kda.checks import check_arguments
from pallas_kernels.kda.chunked import chunk_transition, kda_chunked
from pallas_kernels.kda.recurrent import kda_recurrent
from pallas_kernels.target import target

__all__ = ["Implementation", "chunk_transition", "kda", "kda_transition"]

Implementation = Literal["recurrent", "chunked", "hopper", "tpu"]

_HOPPER_JAX = (0, 11)
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
        implementation: the form to use; None picks one and logs the choice once: `tpu` on TPUs for bf16 and float32 inputs, `hopper`
            on Hopper GPUs for bf16 inputs of at most 128 channels (JAX 0.11 or newer), else `chunked`; inside a `shard_map` the mesh's
            devices count.

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
        form = _hopper(*arguments[:4]).kda_hopper
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
    implementation: Literal["chunked", "hopper", "tpu"] | None = None,
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
    elif implementation == "hopper":
        form = _hopper(*arguments[:3]).transition_hopper
    elif implementation == "chunked":
        form = chunk_transition
    else:
        raise ValueError(f'implementation must be "chunked", "hopper", "tpu" or None, got {implementation!r}')
    return form(*arguments, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT)


_KERNELS: dict[str, Literal["hopper", "tpu"]] = {"gpu": "hopper", "tpu": "tpu"}


@functools.cache
def _choose(platform: str, reason: str | None) -> Literal["chunked", "hopper", "tpu"]:
    """The form for a platform; `reason` is why its kernels do not apply. Cached, so that each choice is logged once."""
    if reason is not None:
        _logger.warning("KDA on %s falls back to the slower chunked form (XLA): %s", platform, reason)
    elif platform in _KERNELS:
        _logger.info("KDA on %s: %s kernels", platform, {"gpu": "Mosaic GPU", "tpu": "Mosaic TPU"}[platform])
        return _KERNELS[platform]
    else:
        _logger.info("KDA on %s: chunked (XLA)", platform)
    return "chunked"


def _choice(*arrays: jax.Array) -> Literal["chunked", "hopper", "tpu"]:
    """For token inputs of which beta is the last."""
    platform = target().platform
    if platform == "tpu":
        from pallas_kernels.kda import tpu  # only where it is used: its imports take time

        return _choose(platform, tpu.unsupported_reason(*arrays))
    return _choose(platform, _hopper_refusal(*arrays[:-1]) if platform == "gpu" else None)


def _hopper_refusal(*arrays: jax.Array) -> str | None:
    """Why the Hopper kernels do not run on this process's GPU, or None."""
    if jax.__version_info__ < _HOPPER_JAX:
        return f"the kernels need JAX 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if capability != "9.0":
        return f"the GPU's compute capability is {capability}, the kernels are for 9.0 (H100, H200)"
    from pallas_kernels.kda import hopper  # JAX 0.10 cannot import it

    return hopper.unsupported_reason(*arrays)


def _tpu(*arrays: jax.Array) -> Callable[..., tuple[jax.Array, jax.Array]]:
    from pallas_kernels.kda import tpu

    reason = tpu.unsupported_reason(*arrays)
    if reason is not None:
        raise ValueError(f'implementation "tpu" does not apply: {reason}')
    return tpu.kda_tpu


def _hopper(*arrays: jax.Array) -> ModuleType:
    if jax.__version_info__ < _HOPPER_JAX:
        raise ValueError(f'implementation "hopper" needs JAX 0.11 or newer, this is {jax.__version__}')
    from pallas_kernels.kda import hopper

    reason = hopper.unsupported_reason(*arrays)
    if reason is not None:
        raise ValueError(f'implementation "hopper" does not apply: {reason}')
    return hopper
