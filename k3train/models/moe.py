"""Experts on the full width, as in Kimi K2: the form that Stable LatentMoE grew out of.

Legend: B batch, T tokens, D model, E experts, k active experts, F hidden of an expert.
"""

from __future__ import annotations

import jax
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.feed_forward import FeedForward, activation
from k3train.models.layout import Layout
from k3train.models.parameters import weight, zeros
from k3train.models.reports import Report
from k3train.models.router import choose_experts


class MoE(nnx.Module):
    """y = sum_j p_j expert_j(x) + shared(x), with p from the router, `routed_scaling` included."""

    def __init__(self, config: ModelConfig):
        self.config = config
        moe, D = config.moe, config.d_model
        E, F = moe.num_experts, moe.expert_dim
        self.router = weight((D, E), ("embed", "experts"), config)
        self.router_bias = zeros((E,), ("experts",), config)
        self.w_gate = weight((E, D, F), ("experts", "embed", "expert_mlp"), config)
        self.w_up = weight((E, D, F), ("experts", "embed", "expert_mlp"), config)
        self.w_down = weight((E, F, D), ("experts", "expert_mlp", "embed"), config)
        self.shared = FeedForward(config, moe.num_shared_experts * F) if moe.num_shared_experts else None

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, *, collect: bool = False) -> tuple[jax.Array, Report]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, report of `router.choose_experts`)."""
        config, dtype = self.config, x_BTD.dtype
        routing, report = choose_experts(x_BTD, self.router[...], self.router_bias[...], config.moe, segment_ids_BT, layout, collect)
        experts = (w[...].astype(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        y_BTD = layout.experts(x_BTD, routing.expert_ids_BTk, routing.weights_BTk, *experts, activation=activation(config)).astype(dtype)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), report
