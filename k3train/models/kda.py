"""Kimi Delta Attention, the layer (report 2.1.1, eqs 1, 2, 5, 6).

Legend: B batch, T tokens, D model, H heads, K channels of a head (key and value alike), R bottleneck of the decay
gate, W taps of the short convolutions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.layout import Layout
from k3train.models.norms import gated_rms_norm, wide
from k3train.models.parameters import Uniform, declare, ones, weight, zeros
from k3train.models.reports import Report, row_sums


@dataclass(frozen=True)
class DecaySteps:
    """Inverse softplus of a log-uniform step in [0.001, 0.1], so that channels start with decays of many lengths.

    With A_log and the gate's projection at zero, the first log decay is -5 (1 - exp(-step)) (report 2.1.1).
    """

    noise: str = "uniform"

    def __call__(self, noise: jax.Array) -> jax.Array:
        """See `parameters.Initial`."""
        low, high = math.log(1e-3), math.log(1e-1)
        step = jnp.exp(low + (high - low) * noise)
        return step + jnp.log(-jnp.expm1(-step))


class KimiDeltaAttention(nnx.Module):
    """Delta rule with a decay per channel, between short convolutions and a gated norm. Uses no positions."""

    def __init__(self, config: ModelConfig):
        self.config = config
        D, H, K, W = config.d_model, config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
        heads, taps = ("embed", "heads", "head_dim"), ("heads", "head_dim", "conv")
        self.q_proj = weight((D, H, K), heads, config)
        self.k_proj = weight((D, H, K), heads, config)
        self.v_proj = weight((D, H, K), heads, config)
        self.gate_proj = weight((D, H, K), heads, config)
        self.q_conv = declare((H, K, W), taps, Uniform(W**-0.5), config)
        self.k_conv = declare((H, K, W), taps, Uniform(W**-0.5), config)
        self.v_conv = declare((H, K, W), taps, Uniform(W**-0.5), config)
        self.beta_proj = weight((D, H), ("embed", "heads"), config)
        self.decay_down = weight((D, K), ("embed", "decay_rank"), config)
        self.decay_up = weight((K, H, K), ("decay_rank", "heads", "head_dim"), config)
        self.a_log = zeros((H,), ("heads",), config)
        self.dt_bias = declare((H, K), ("heads", "head_dim"), DecaySteps(), config)
        self.out_norm = ones((K,), ("norm",), config)
        self.out_proj = weight((H, K, D), ("heads", "head_dim", "embed"), config)

    @property
    def convolutions(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The taps [H, K, W] for q, k and v."""
        return self.q_conv[...], self.k_conv[...], self.v_conv[...]

    def projections(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v [B, T, H, K] before their convolutions."""
        return _by_heads(x_BTD, self.q_proj), _by_heads(x_BTD, self.k_proj), _by_heads(x_BTD, self.v_proj)

    def gates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Raw logits of the decay [B, T, H, K] and of the write's size [B, T, H]."""
        dtype = x_BTD.dtype
        decay_BTHK = jnp.einsum("btr,rhk->bthk", x_BTD @ self.decay_down[...].astype(dtype), self.decay_up[...].astype(dtype))
        return decay_BTHK, (x_BTD @ self.beta_proj[...].astype(dtype)).astype(wide(dtype))

    def output(self, o_BTHK: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """The heads' outputs, normalised and gated by the layer's input, back to the model's width; [B, T, D] in x's dtype."""
        y_BTHK = gated_rms_norm(o_BTHK, _by_heads(x_BTD, self.gate_proj), self.out_norm[...], self.config.norm_eps)
        return jnp.einsum("bthk,hkd->btd", y_BTHK, self.out_proj[...].astype(x_BTD.dtype))

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, *, collect: bool = False) -> tuple[jax.Array, Report]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, report).

        The report is empty, or with `collect` what `decay_report` gives.
        """
        decay_BTHK, beta_BTH = self.gates(x_BTD)
        q_BTHK, k_BTHK, v_BTHK = (
            layout.short_conv(projected_BTHK, w_HKW, segment_ids_BT=segment_ids_BT)
            for projected_BTHK, w_HKW in zip(self.projections(x_BTD), self.convolutions, strict=True)
        )
        a_log_H, dt_bias_HK, lower_bound = self.a_log[...], self.dt_bias[...], self.config.kda.gate_lower_bound
        o_BTHK = layout.kda(
            q_BTHK, k_BTHK, v_BTHK, decay_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT
        )
        report = decay_report(decay_BTHK, a_log_H, dt_bias_HK, lower_bound, segment_ids_BT) if collect else {}
        return self.output(o_BTHK, x_BTD), report


def decay_report(decay_BTHK: jax.Array, a_log_H: jax.Array, dt_bias_HK: jax.Array, lower_bound: float, segment_ids_BT: jax.Array) -> Report:
    """How fast the states fade: per row [B], sums over real tokens of means over heads and channels, float32, without gradient.

    `kda_log_decay`: g = lower_bound sigmoid(exp(a_log) (decay + dt_bias)) (report eq. 5); `kda_at_bound`: whether g lies within one
    hundredth of the bound.
    """
    decay_BTHK, a_log_H, dt_bias_HK = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in (decay_BTHK, a_log_H, dt_bias_HK))
    share_BTHK = jax.nn.sigmoid(jnp.exp(a_log_H)[:, None] * (decay_BTHK + dt_bias_HK))
    real_BT = segment_ids_BT >= 0
    return {
        "kda_log_decay": row_sums(lower_bound * jnp.mean(share_BTHK, axis=(2, 3)), real_BT),
        "kda_at_bound": row_sums(jnp.mean(share_BTHK > 0.99, axis=(2, 3)), real_BT),
    }


def _by_heads(x_BTD: jax.Array, w_DHK: nnx.Param) -> jax.Array:
    return jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK[...].astype(x_BTD.dtype))
