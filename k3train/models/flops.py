"""How many parameters a model has, how many of them a token meets, and the floating-point work per token.

Everything is counted from the canonical parameter tree (`models.stacks.unstack`), whose leaves may be arrays or abstract shapes, so the
figures follow the model that is really built. Legend: D model, H heads, K/V key/value channels, C chunk, T sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from k3train.config import ModelConfig

KDA_CHUNK = 64
"""Tokens in a chunk of the counted KDA form (report eqs 3-4), whichever kernel runs."""

PARTS = (
    "embedding", "kda", "gated_mla", "mla_rope", "attention_residuals", "dense_feed_forward", "routed_experts", "shared_experts", "router",
    "latent_projections", "norms", "head",
)  # fmt: skip
ATTENTION_RESIDUALS = ("mixer_res", "ffn_res", "output_res")
NORMS = ("mixer_norm", "ffn_norm", "norm")
NOT_MATMULS = ("embedding", "dt_bias")
"""Leaves of two or more dimensions that no matmul or convolution reads."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the model."""

    total: int = 0
    """Parameters."""
    active: int = 0
    """Parameters on one token's path, the head included and the embedding table left out; k of E routed experts count."""
    forward_flops: int = 0
    """Floating-point operations per token, a multiply-add counting two."""

    def __add__(self, other: Part) -> Part:
        return Part(
            total=self.total + other.total,
            active=self.active + other.active,
            forward_flops=self.forward_flops + other.forward_flops,
        )


def parts(canonical: Mapping[str, Any], config: ModelConfig, sequence_length: int) -> dict[str, Part]:
    """Counts by part of the model, at rows of `sequence_length` tokens, each row one document.

    Forward operations per token are, summed over the layers,

        2 x (active entries of matrices and convolutions)
        + MLA of either kind:   H (T+1) (K + V)                       scores and values of the causal half, K = nope + rope
        + KDA:                  H (6 K V + C (3 K + 2 V) + C^2 / 3)   chunk form: state read, correction and update; pair matrices, inverse
        + Attention Residuals:  4 D (sources of the mix)              scores and weighted sum, at every mix

    Norms, activations, softmax and top-k are left out. Training takes three times the forward work; recomputation is not counted.

    Returns:
        Part by name, in the order of `PARTS`; parts that the model lacks are absent.
    """
    result: dict[str, Part] = {}
    for keys, leaf in jax.tree.leaves_with_path(canonical):
        path, size = tuple(str(key.key) for key in keys), math.prod(leaf.shape)
        name = _part_name(path, config)
        active = 0 if name == "embedding" else size
        if name == "routed_experts":
            active = size * config.moe.experts_per_token // config.moe.num_experts
        multiplied = len(leaf.shape) > 1 and path[-1] not in NOT_MATMULS
        result[name] = result.get(name, Part()) + Part(total=size, active=active, forward_flops=2 * active if multiplied else 0)
    for name, flops in _sequence_and_depth_flops(config, sequence_length).items():
        if flops:
            result[name] += Part(forward_flops=flops)
    return {name: result[name] for name in PARTS if name in result}


def whole(by_part: Mapping[str, Part]) -> Part:
    """The sum over the parts."""
    return sum(by_part.values(), Part())


def training_flops(forward_flops: int) -> int:
    """Forward and backward: each forward matmul has two more in the backward pass."""
    return 3 * forward_flops


def _sequence_and_depth_flops(config: ModelConfig, sequence_length: int) -> dict[str, int]:
    """The work that no parameter stands for."""
    kda, mla = config.kda, config.mla
    chunk = min(KDA_CHUNK, sequence_length)
    state = 6 * kda.head_dim**2 + chunk * 5 * kda.head_dim + chunk**2 // 3
    pairs = (sequence_length + 1) * (mla.nope_head_dim + mla.rope_head_dim + mla.v_head_dim)
    return {
        "kda": config.mixers.count("kda") * kda.num_heads * state,
        **{kind: config.mixers.count(kind) * mla.num_heads * pairs for kind in ("gated_mla", "mla_rope")},
        "attention_residuals": 4 * config.d_model * sum(attention_residual_sources(config)),
    }


def attention_residual_sources(config: ModelConfig) -> list[int]:
    """Number of sources of every mix in the forward pass, in order (report eqs 8-10): two per layer, save the first, and the output's."""
    if config.depth == "residual":
        return []
    if config.depth == "full_attention_residuals":
        return list(range(2, 2 * config.num_layers + 2))
    sources, blocks = [], 0
    for layer in range(config.num_layers):
        starts_block = layer % config.attn_res_block_size == 0
        if layer > 0:
            sources.append(blocks + 1)
        blocks += starts_block
        sources.append(blocks + 1)
    return [*sources, blocks + 1]


def _part_name(path: tuple[str, ...], config: ModelConfig) -> str:
    """The part that a canonical leaf belongs to."""
    if path[0] == "embed":
        return "embedding"
    if path[0] == "head":
        return "head"
    group = path[2] if path[0] == "layers" else path[0]
    if group in ATTENTION_RESIDUALS:
        return "attention_residuals"
    if group in NORMS:
        return "norms"
    layer, leaf = int(path[1]), path[3]
    if group == "mixer":
        return config.mixers[layer]
    if config.feed_forwards[layer] == "dense":
        return "dense_feed_forward"
    if leaf == "shared":
        return "shared_experts"
    if leaf.startswith("router"):
        return "router"
    return "latent_projections" if leaf.startswith("latent") else "routed_experts"
