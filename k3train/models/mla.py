"""Gated multi-head latent attention without positions (report 2.1.2, eq. 7).

Legend: B batch, T tokens, D model, H heads, K = N + P query/key channels (N per head, P shared by the heads), V value
channels, Q and C the latent widths of queries and of keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models.layout import Layout
from k3train.models.norms import rms_norm
from k3train.models.parameters import ones, weight


class GatedMLA(nnx.Module):
    """Softmax attention over keys and values expanded from one latent, gated per channel."""

    def __init__(self, config: ModelConfig):
        self.config = config
        mla, D = config.mla, config.d_model
        H, N, P, V, Q, C = mla.num_heads, mla.nope_head_dim, mla.rope_head_dim, mla.v_head_dim, mla.q_lora_rank, mla.kv_lora_rank
        self.q_down = weight((D, Q), ("embed", "q_rank"), config)
        self.q_norm = ones((Q,), ("norm",), config)
        self.q_up = weight((Q, H, N + P), ("q_rank", "heads", "head_dim"), config)
        self.kv_down = weight((D, C + P), ("embed", "kv_rank"), config)
        self.kv_norm = ones((C,), ("norm",), config)
        self.kv_up = weight((C, H, N + V), ("kv_rank", "heads", "head_dim"), config)
        self.gate_proj = weight((D, H, V), ("embed", "heads", "head_dim"), config)
        self.out_proj = weight((H, V, D), ("heads", "head_dim", "embed"), config)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, {"max_logit": [H]})."""
        mla, dtype = self.config.mla, x_BTD.dtype
        H, N, P, C = mla.num_heads, mla.nope_head_dim, mla.rope_head_dim, mla.kv_lora_rank
        q_latent_BTQ = rms_norm(x_BTD @ self.q_down[...].astype(dtype), self.q_norm[...], mla.latent_norm_eps)
        q_BTHK = jnp.einsum("btq,qhk->bthk", q_latent_BTQ, self.q_up[...].astype(dtype))

        latent_BTC, shared_key_BTP = jnp.split(x_BTD @ self.kv_down[...].astype(dtype), [C], axis=-1)
        latent_BTC = rms_norm(latent_BTC, self.kv_norm[...], mla.latent_norm_eps)  # the shared key is not normalised
        keys_values = jnp.einsum("btc,chk->bthk", latent_BTC, self.kv_up[...].astype(dtype))
        key_BTHN, v_BTHV = jnp.split(keys_values, [N], axis=-1)
        shared_BTHP = jnp.broadcast_to(shared_key_BTP[:, :, None], (*x_BTD.shape[:2], H, P))
        k_BTHK = jnp.concatenate([key_BTHN, shared_BTHP], axis=-1)

        o_BTHV, max_logit_H = layout.attention(q_BTHK, k_BTHK, v_BTHV, scale=(N + P) ** -0.5, segment_ids_BT=segment_ids_BT)
        gate_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, self.gate_proj[...].astype(dtype))
        gated_BTHV = (jax.nn.sigmoid(gate_BTHV.astype(o_BTHV.dtype)) * o_BTHV).astype(dtype)
        return jnp.einsum("bthv,hvd->btd", gated_BTHV, self.out_proj[...].astype(dtype)), {"max_logit": max_logit_H}
