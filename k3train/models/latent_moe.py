"""Stable LatentMoE (report 2.3, eqs 11-13).

Legend: B batch, T tokens, D model, E experts, k active experts, L latent, F hidden of an expert.
"""

from __future__ import annotations

import jax
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.feed_forward import FeedForward, activation
from k3train.models.layout import Layout
from k3train.models.norms import rms_norm
from k3train.models.parameters import ones, weight, zeros
from k3train.models.reports import Report
from k3train.models.router import choose_experts


class LatentMoE(nnx.Module):
    """Routed experts in a narrow latent, shared experts on the full width."""

    def __init__(self, config: ModelConfig):
        self.config = config
        moe, D = config.moe, config.d_model
        E, L, F = moe.num_experts, moe.latent_dim, moe.expert_dim
        self.router = weight((D, E), ("embed", "experts"), config)
        self.router_bias = zeros((E,), ("experts",), config)
        self.latent_down = weight((D, L), ("embed", "latent"), config)
        self.latent_norm = ones((L,), ("norm",), config)
        self.latent_up = weight((L, D), ("latent", "embed"), config)
        self.w_gate = weight((E, L, F), ("experts", "latent", "expert_mlp"), config)
        self.w_up = weight((E, L, F), ("experts", "latent", "expert_mlp"), config)
        self.w_down = weight((E, F, L), ("experts", "expert_mlp", "latent"), config)
        self.shared = FeedForward(config, moe.num_shared_experts * F) if moe.num_shared_experts else None

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, *, collect: bool = False) -> tuple[jax.Array, Report]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, report of `router.choose_experts`)."""
        config, dtype = self.config, x_BTD.dtype
        routing, report = choose_experts(x_BTD, self.router[...], self.router_bias[...], config.moe, segment_ids_BT, layout, collect)

        z_BTL = x_BTD @ self.latent_down[...].astype(dtype)
        experts = (w[...].astype(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        u_BTL = layout.experts(z_BTL, routing.expert_ids_BTk, routing.weights_BTk, *experts, activation=activation(config)).astype(dtype)
        y_BTD = rms_norm(u_BTL, self.latent_norm[...], config.norm_eps) @ self.latent_up[...].astype(dtype)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), report
