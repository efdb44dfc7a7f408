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

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, nothing to report)."""
        dtype = x_BTD.dtype

        def project(w_DHK: nnx.Param) -> jax.Array:
            return jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK[...].astype(dtype))

        q_BTHK = layout.short_conv(project(self.q_proj), self.q_conv[...], segment_ids_BT=segment_ids_BT)
        k_BTHK = layout.short_conv(project(self.k_proj), self.k_conv[...], segment_ids_BT=segment_ids_BT)
        v_BTHK = layout.short_conv(project(self.v_proj), self.v_conv[...], segment_ids_BT=segment_ids_BT)
        decay_BTHK = jnp.einsum("btr,rhk->bthk", x_BTD @ self.decay_down[...].astype(dtype), self.decay_up[...].astype(dtype))
        beta_BTH = (x_BTD @ self.beta_proj[...].astype(dtype)).astype(wide(dtype))
        o_BTHK = layout.kda(
            q_BTHK, k_BTHK, v_BTHK, decay_BTHK, beta_BTH, self.a_log[...], self.dt_bias[...],
            lower_bound=self.config.kda.gate_lower_bound, segment_ids_BT=segment_ids_BT,
        )  # fmt: skip
        y_BTHK = gated_rms_norm(o_BTHK, project(self.gate_proj), self.out_norm[...], self.config.norm_eps)
        return jnp.einsum("bthk,hkd->btd", y_BTHK, self.out_proj[...].astype(dtype)), {}
