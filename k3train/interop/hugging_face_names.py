"""Where each parameter lies in the released checkpoint: its name, and how its axes are stored. One table for reading and writing.

Weights are stored `[out, in]` with heads and channels merged. Legend: D model, H heads, K channels, W taps, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from k3train.config import ModelConfig
from k3train.errors import UserError

Shape = tuple[int, ...]
Form = Literal["as_is", "linear", "output", "conv", "flat", "row", "padded"]


class Channels(NamedTuple):
    """Which channels of every head of a stored tensor are ours."""

    start: int
    total: int


@dataclass(frozen=True)
class Stored:
    """The released name of one of our leaves, and the form in which its values lie there.

    as_is: the same axes; linear: [in, ...out] as [out, in]; output: [...in, out] as [out, in]; conv: [H, K, W] as [H K, 1, W];
    flat: all axes merged; row: [D] as [1, D]; padded: [H] as [H] or longer, the rest zero.
    A name with `{expert}` stands for one tensor per expert, along our first axis. With `channels`, several leaves lie in one tensor, side
    by side along our last axis.
    """

    name: str
    form: Form
    channels: Channels | None = None

    def shape(self, ours: Shape) -> Shape:
        """Shape of the stored tensor for our shape (for `padded` the shortest)."""
        if self.channels:
            ours = (*ours[:-1], self.channels.total)
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
        stored = stored.T if self.form in ("linear", "output") else stored
        if self.channels is None:
            return stored.reshape(ours)
        start, total = self.channels
        return stored.reshape(*ours[:-1], total)[..., start : start + ours[-1]]

    def to_stored(self, ours: np.ndarray) -> np.ndarray:
        """Our array, all its `channels` joined, with the stored axes."""
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
        "mixer.k_up": Stored("self_attn.kv_b_proj.weight", "linear"),  # with v_up: per head key channels, then value channels
        "mixer.v_up": Stored("self_attn.kv_b_proj.weight", "linear"),
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


def check_released(config: ModelConfig) -> None:
    """Raises `UserError` if the model is not of the released kind, for which alone there are names."""
    scaling = config.moe.routed_scaling
    kinds = {
        "mixer_pattern": (tuple(sorted({*config.mixers} - {*MIXERS})), "kda, gated_mla"),
        "depth": ((config.depth,) if config.depth != "block_attention_residuals" else (), "block_attention_residuals"),
        "width": (tuple(sorted({*config.feed_forwards} - {*FEED_FORWARDS})), "latent_moe"),
        "activation": ((config.activation,) if config.activation != "situ_glu" else (), "situ_glu"),
        "moe.routed_scaling": ((str(scaling),) if scaling != 1.0 else (), "1.0"),
    }
    problems = [f"model.{name} has {', '.join(found)}: only {known} can be stored" for name, (found, known) in kinds.items() if found]
    if problems:
        raise UserError(
            "The Hugging Face format of Kimi K3 has no place for this model:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nUse the run's own checkpoints; `k3train score` reads them too."
        )


def stored(path: tuple[str, ...], config: ModelConfig) -> Stored:
    """Where the leaf at a canonical path lies; the name comes without `PREFIX`."""
    if path[0] != "layers":
        return TOP[".".join(path)]
    layer, leaf = int(path[1]), ".".join(path[2:])
    rule = (LAYER | MIXERS[config.mixers[layer]] | FEED_FORWARDS[config.feed_forwards[layer]])[leaf]
    keys, values = config.mla.nope_head_dim, config.mla.v_head_dim
    channels = {"mixer.k_up": Channels(0, keys + values), "mixer.v_up": Channels(keys, keys + values)}.get(leaf)
    return Stored(f"model.layers.{layer}.{rule.name}", rule.form, channels)


def gathered(canonical: Mapping[str, Any], config: ModelConfig) -> list[tuple[Stored, list[Any]]]:
    """The leaves of a canonical tree, those that lie in one tensor together, in the order of their channels."""
    by_name: dict[str, list[tuple[Stored, Any]]] = {}
    for path, leaf in jax.tree.leaves_with_path(canonical):
        rule = stored(keys_of(path), config)
        by_name.setdefault(rule.name, []).append((rule, leaf))
    ordered = (sorted(parts, key=lambda part: part[0].channels or (0, 0)) for parts in by_name.values())
    return [(parts[0][0], [leaf for _, leaf in parts]) for parts in ordered]


def tensors(rule: Stored, leaves: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The stored tensors of one entry of `gathered`, by name without `PREFIX`."""
    ours = np.concatenate([np.asarray(leaf) for leaf in leaves], axis=-1) if len(leaves) > 1 else np.asarray(leaves[0])
    if "{expert}" in rule.name:
        for expert, matrix in enumerate(ours):
            yield rule.name.format(expert=expert), np.ascontiguousarray(rule.to_stored(matrix))
    else:
        yield rule.name, np.ascontiguousarray(rule.to_stored(ours))


def keys_of(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """The names along a path in a tree of dicts."""
    return tuple(str(entry.key) for entry in path)  # type: ignore[attr-defined]
