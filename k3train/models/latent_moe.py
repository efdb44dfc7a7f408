"""Stable LatentMoE (report 2.3, eqs 11-13).

Legend: B batch, T tokens, D model, E experts, k active experts, L latent, F hidden of an expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.feed_forward import FeedForward, activation
from k3train.models.layout import Layout
from k3train.models.norms import rms_norm, wide
from k3train.models.parameters import ones, weight, zeros


def route(scores_BTE: jax.Array, bias_E: jax.Array, active: int) -> tuple[jax.Array, jax.Array]:
    """Chooses the top `active` experts of score + bias, weighs them by the scores alone (report eq. 11).

    Returns ids int32 [B, T, k] by falling biased score and weights [B, T, k] that sum to one. The bias gets no gradient.
    """
    _, ids_BTk = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE + bias_E), active)
    chosen_BTk = jnp.take_along_axis(scores_BTE, ids_BTk, axis=-1)
    return ids_BTk, chosen_BTk / (jnp.sum(chosen_BTk, axis=-1, keepdims=True) + 1e-20)


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

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D] -> (y [B, T, D] in x's dtype, {"expert_load": int32 [E], "expert_ids": int32 [B, T, k]}).

        The load counts real tokens only.
        """
        config, dtype = self.config, x_BTD.dtype
        num_experts, active = config.moe.num_experts, config.moe.experts_per_token
        router_DE = self.router[...].astype(wide(dtype))
        scores_BTE = jax.nn.sigmoid(jnp.einsum("btd,de->bte", x_BTD.astype(wide(dtype)), router_DE, precision=jax.lax.Precision.HIGHEST))
        ids_BTk, weights_BTk = route(scores_BTE, self.router_bias[...].astype(scores_BTE.dtype), active)

        z_BTL = x_BTD @ self.latent_down[...].astype(dtype)
        experts = (w[...].astype(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        u_BTL = layout.experts(z_BTL, ids_BTk, weights_BTk, *experts, activation=activation(config)).astype(dtype)
        y_BTD = rms_norm(u_BTL, self.latent_norm[...], config.norm_eps) @ self.latent_up[...].astype(dtype)
        if self.shared is not None:
            y_BTD += self.shared(x_BTD)

        real_BTk = jnp.broadcast_to((segment_ids_BT >= 0)[..., None], ids_BTk.shape)
        load_E = jnp.zeros(num_experts, jnp.int32).at[ids_BTk.reshape(-1)].add(real_BTk.reshape(-1).astype(jnp.int32))
        return y_BTD, {"expert_load": load_E, "expert_ids": ids_BTk}
