"""Multi-head latent attention: gated and without positions as in K3 (report 2.1.2, eq. 7), or ungated and rotary as in K2.

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
from k3train.models.rotary import document_positions, rotate

Report = dict[str, jax.Array]


class LatentAttention(nnx.Module):
    """Softmax attention over keys and values expanded from one latent: what the two kinds share.

    `__call__` is the whole layer. Its parts stand alone so that a token-by-token form can keep latents and attend to them.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        mla, D = config.mla, config.d_model
        H, N, P, V, Q, C = mla.num_heads, mla.nope_head_dim, mla.rope_head_dim, mla.v_head_dim, mla.q_lora_rank, mla.kv_lora_rank
        self.q_down = weight((D, Q), ("embed", "q_rank"), config)
        self.q_norm = ones((Q,), ("norm",), config)
        self.q_up = weight((Q, H, N + P), ("q_rank", "heads", "head_dim"), config)
        self.kv_down = weight((D, C + P), ("embed", "kv_rank"), config)
        self.kv_norm = ones((C,), ("norm",), config)
        self.k_up = weight((C, H, N), ("kv_rank", "heads", "head_dim"), config)
        self.v_up = weight((C, H, V), ("kv_rank", "heads", "head_dim"), config)
        self.out_proj = weight((H, V, D), ("heads", "head_dim", "embed"), config)

    @property
    def scale(self) -> float:
        """Factor on the logits: one over the root of the query width."""
        return (self.config.mla.nope_head_dim + self.config.mla.rope_head_dim) ** -0.5

    def queries(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """q [B, T, H, K]: per head N channels of its own, then P that meet the shared key. Positions count for the rotary kind alone."""
        dtype, mla = x_BTD.dtype, self.config.mla
        latent_BTQ = rms_norm(x_BTD @ self.q_down[...].astype(dtype), self.q_norm[...], mla.latent_norm_eps)
        return jnp.einsum("btq,qhk->bthk", latent_BTQ, self.q_up[...].astype(dtype))

    def latents(self, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a token leaves behind for later ones: the normalised latent [B, T, C] and the shared key [B, T, P], not normalised."""
        dtype, mla = x_BTD.dtype, self.config.mla
        latent_BTC, shared_key_BTP = jnp.split(x_BTD @ self.kv_down[...].astype(dtype), [mla.kv_lora_rank], axis=-1)
        return rms_norm(latent_BTC, self.kv_norm[...], mla.latent_norm_eps), shared_key_BTP

    def expand(self, latent_BTC: jax.Array, shared_key_BTP: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, T, H, K] and values [B, T, H, V] of every head."""
        dtype = latent_BTC.dtype
        key_BTHN = jnp.einsum("btc,chn->bthn", latent_BTC, self.k_up[...].astype(dtype))
        v_BTHV = jnp.einsum("btc,chv->bthv", latent_BTC, self.v_up[...].astype(dtype))
        shared_BTHP = jnp.broadcast_to(shared_key_BTP[:, :, None], (*key_BTHN.shape[:3], shared_key_BTP.shape[-1]))
        return jnp.concatenate([key_BTHN, shared_BTHP], axis=-1), v_BTHV

    def output(self, o_BTHV: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """The heads' outputs, in at least float32, back to the model's width; [B, T, D] in x's dtype."""
        return jnp.einsum("bthv,hvd->btd", o_BTHV.astype(x_BTD.dtype), self.out_proj[...].astype(x_BTD.dtype))

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, *, collect: bool = False) -> tuple[jax.Array, Report]:
        """x [B, T, D], segment ids int32 [B, T] -> (y [B, T, D] in x's dtype, {"max_logit": [H]}); `collect` adds nothing."""
        positions_BT = document_positions(segment_ids_BT)
        q_BTHK = self.queries(x_BTD, positions_BT)
        k_BTHK, v_BTHV = self.expand(*self.latents(x_BTD, positions_BT))
        o_BTHV, max_logit_H = layout.attention(q_BTHK, k_BTHK, v_BTHV, scale=self.scale, segment_ids_BT=segment_ids_BT)
        return self.output(o_BTHV, x_BTD), {"max_logit": max_logit_H}


class GatedMLA(LatentAttention):
    """K3's kind: no positions, and a gate per channel of the heads' outputs."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        mla = config.mla
        self.gate_proj = weight((config.d_model, mla.num_heads, mla.v_head_dim), ("embed", "heads", "head_dim"), config)

    def output(self, o_BTHV: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """See `LatentAttention.output`; the gate reads the layer's input and multiplies before the one cast."""
        gate_BTHV = jnp.einsum("btd,dhv->bthv", x_BTD, self.gate_proj[...].astype(x_BTD.dtype))
        return super().output(jax.nn.sigmoid(gate_BTHV.astype(o_BTHV.dtype)) * o_BTHV, x_BTD)


class RotaryMLA(LatentAttention):
    """K2's kind: shared channels rotated by the token's position in its document, and no gate."""

    def queries(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """See `LatentAttention.queries`."""
        own_BTHN, shared_BTHP = jnp.split(super().queries(x_BTD, positions_BT), [self.config.mla.nope_head_dim], axis=-1)
        return jnp.concatenate([own_BTHN, rotate(shared_BTHP, positions_BT[..., None], self.config.mla.rope_theta)], axis=-1)

    def latents(self, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `LatentAttention.latents`."""
        latent_BTC, shared_key_BTP = super().latents(x_BTD, positions_BT)
        return latent_BTC, rotate(shared_key_BTP, positions_BT, self.config.mla.rope_theta)
