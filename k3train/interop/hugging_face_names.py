"""Where each parameter lies in the released checkpoint: its name, and how its axes are stored. One table for reading and writing.

Weights are stored `[out, in]` with heads and channels merged. Legend: D model, H heads, K channels, W taps, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from k3train.config import ModelConfig

Shape = tuple[int, ...]
Form = Literal["as_is", "linear", "output", "conv", "flat", "row", "padded"]


@dataclass(frozen=True)
class Stored:
    """The released name of one of our leaves, and the form in which its values lie there.

    as_is: the same axes; linear: [in, ...out] as [out, in]; output: [...in, out] as [out, in]; conv: [H, K, W] as [H K, 1, W];
    flat: all axes merged; row: [D] as [1, D]; padded: [H] as [H] or longer, the rest zero.
    A name with `{expert}` stands for one tensor per expert, along our first axis.
    """

    name: str
    form: Form

    def shape(self, ours: Shape) -> Shape:
        """Shape of the stored tensor for our shape (for `padded` the shortest)."""
        match self.form:
            case "linear":
                return (math.prod(ours[1:]), ours[0])
            case "output":
                return (ours[-1], math.prod(ours[:-1]))
            case "conv":
                return (math.prod(ours[:-1]), 1, ours[-1])
            case "flat":
                return (math.prod(ours),)
            case "row":
                return (1, *ours)
            case _:
                return ours

    def to_ours(self, stored: np.ndarray, ours: Shape) -> np.ndarray:
        """The stored tensor with our axes."""
        if self.form == "padded":
            return stored[: ours[0]]
        return (stored.T if self.form in ("linear", "output") else stored).reshape(ours)

    def to_stored(self, ours: np.ndarray) -> np.ndarray:
        """Our array with the stored axes."""
        shape = self.shape(ours.shape)
        return ours.reshape(shape[::-1]).T if self.form in ("linear", "output") else ours.reshape(shape)


PREFIX = "language_model."
"""Stands before every text tensor in the released checkpoint."""

TOP = {
    "embed.embedding": Stored("model.embed_tokens.weight", "as_is"),
    "output_res.key_norm": Stored("model.output_attn_res_norm.weight", "as_is"),
    "output_res.query": Stored("model.output_attn_res_proj.weight", "row"),
    "norm.scale": Stored("model.norm.weight", "as_is"),
    "head.kernel": Stored("lm_head.weight", "linear"),
}
LAYER = {
    "mixer_res.key_norm": Stored("self_attention_res_norm.weight", "as_is"),
    "mixer_res.query": Stored("self_attention_res_proj.weight", "row"),
    "mixer_norm.scale": Stored("input_layernorm.weight", "as_is"),
    "ffn_res.key_norm": Stored("mlp_res_norm.weight", "as_is"),
    "ffn_res.query": Stored("mlp_res_proj.weight", "row"),
    "ffn_norm.scale": Stored("post_attention_layernorm.weight", "as_is"),
}
MIXERS = {
    "kda": {
        "mixer.q_proj": Stored("self_attn.q_proj.weight", "linear"),
        "mixer.k_proj": Stored("self_attn.k_proj.weight", "linear"),
        "mixer.v_proj": Stored("self_attn.v_proj.weight", "linear"),
        "mixer.gate_proj": Stored("self_attn.g_proj.weight", "linear"),
        "mixer.q_conv": Stored("self_attn.q_conv1d.weight", "conv"),
        "mixer.k_conv": Stored("self_attn.k_conv1d.weight", "conv"),
        "mixer.v_conv": Stored("self_attn.v_conv1d.weight", "conv"),
        "mixer.beta_proj": Stored("self_attn.b_proj.weight", "linear"),
        "mixer.decay_down": Stored("self_attn.f_a_proj.weight", "linear"),
        "mixer.decay_up": Stored("self_attn.f_b_proj.weight", "linear"),
        "mixer.a_log": Stored("self_attn.A_log", "padded"),
        "mixer.dt_bias": Stored("self_attn.dt_bias", "flat"),
        "mixer.out_norm": Stored("self_attn.o_norm.weight", "as_is"),
        "mixer.out_proj": Stored("self_attn.o_proj.weight", "output"),
    },
    "gated_mla": {
        "mixer.q_down": Stored("self_attn.q_a_proj.weight", "linear"),
        "mixer.q_norm": Stored("self_attn.q_a_layernorm.weight", "as_is"),
        "mixer.q_up": Stored("self_attn.q_b_proj.weight", "linear"),
        "mixer.kv_down": Stored("self_attn.kv_a_proj_with_mqa.weight", "linear"),
        "mixer.kv_norm": Stored("self_attn.kv_a_layernorm.weight", "as_is"),
        "mixer.kv_up": Stored("self_attn.kv_b_proj.weight", "linear"),
        "mixer.gate_proj": Stored("self_attn.g_proj.weight", "linear"),
        "mixer.out_proj": Stored("self_attn.o_proj.weight", "output"),
    },
}
FEED_FORWARDS = {
    "dense": {
        "ffn.gate_proj": Stored("mlp.gate_proj.weight", "linear"),
        "ffn.up_proj": Stored("mlp.up_proj.weight", "linear"),
        "ffn.down_proj": Stored("mlp.down_proj.weight", "linear"),
    },
    "latent_moe": {
        "ffn.router": Stored("block_sparse_moe.gate.weight", "linear"),
        "ffn.router_bias": Stored("block_sparse_moe.gate.e_score_correction_bias", "as_is"),
        "ffn.latent_down": Stored("block_sparse_moe.routed_expert_down_proj.weight", "linear"),
        "ffn.latent_norm": Stored("block_sparse_moe.routed_expert_norm.weight", "as_is"),
        "ffn.latent_up": Stored("block_sparse_moe.routed_expert_up_proj.weight", "linear"),
        "ffn.w_gate": Stored("block_sparse_moe.experts.{expert}.w1.weight", "linear"),
        "ffn.w_up": Stored("block_sparse_moe.experts.{expert}.w3.weight", "linear"),
        "ffn.w_down": Stored("block_sparse_moe.experts.{expert}.w2.weight", "linear"),
        "ffn.shared.gate_proj": Stored("block_sparse_moe.shared_experts.gate_proj.weight", "linear"),
        "ffn.shared.up_proj": Stored("block_sparse_moe.shared_experts.up_proj.weight", "linear"),
        "ffn.shared.down_proj": Stored("block_sparse_moe.shared_experts.down_proj.weight", "linear"),
    },
}


def stored(path: tuple[str, ...], config: ModelConfig) -> Stored:
    """Where the leaf at a canonical path lies; the name comes without `PREFIX`."""
    if path[0] != "layers":
        return TOP[".".join(path)]
    layer, leaf = int(path[1]), ".".join(path[2:])
    rule = (LAYER | MIXERS[config.mixers[layer]] | FEED_FORWARDS[config.feed_forwards[layer]])[leaf]
    return Stored(f"model.layers.{layer}.{rule.name}", rule.form)
