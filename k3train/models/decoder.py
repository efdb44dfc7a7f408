"""The decoder: one mixer and one feed-forward block per layer, joined along the depth (report 2, Fig. 2).

The three axes at first sight: `mixer` mixes along the sequence, `Depth.read` along the depth, `ffn` along the width.
Legend: B batch, T tokens, D model, V vocabulary, E experts, k active experts, L layers, H heads, N depth sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models import stacks
from k3train.models.depth import Carry, Depth, begin, mixing_site
from k3train.models.feed_forward import FeedForward
from k3train.models.kda import KimiDeltaAttention
from k3train.models.latent_moe import LatentMoE
from k3train.models.layout import Layout
from k3train.models.mla import GatedMLA, RotaryMLA
from k3train.models.moe import MoE
from k3train.models.norms import rms_norm
from k3train.models.parameters import graph_and_params, ones, weight
from k3train.models.reports import Report, depth_report, interleave, join

ACTIVATION = ("batch", "tokens", "embed")
MIXERS = {"kda": KimiDeltaAttention, "gated_mla": GatedMLA, "mla_rope": RotaryMLA}
EXPERTS = {"latent_moe": LatentMoE, "moe": MoE}


class Norm(nnx.Module):
    """RMSNorm with its weight."""

    def __init__(self, config: ModelConfig):
        self.eps = config.norm_eps
        self.scale = ones((config.d_model,), ("norm",), config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """x [B, T, D] -> the same shape and dtype."""
        return rms_norm(x_BTD, self.scale[...], self.eps)


class DecoderLayer(nnx.Module):
    """Two sublayers, each reading the depths before it and adding its output to them."""

    def __init__(self, config: ModelConfig, layer: int):
        kind = config.feed_forwards[layer]
        self.mixer_res, self.mixer_norm = mixing_site(config), Norm(config)
        self.mixer = MIXERS[config.mixers[layer]](config)
        self.ffn_res, self.ffn_norm = mixing_site(config), Norm(config)
        self.ffn = FeedForward(config, config.dense_dim) if kind == "dense" else EXPERTS[kind](config)

    def __call__(self, depth: Depth, segment_ids_BT: jax.Array, layout: Layout, collect: bool) -> tuple[Depth, Report]:
        """Takes what earlier depths left, returns it with this layer's part, and the layer's report of small arrays."""
        h_BTD, mixer_weights_NBT = depth.read(self.mixer_res)
        y_BTD, mixer_report = self.mixer(self.mixer_norm(h_BTD), segment_ids_BT, layout, collect=collect)
        depth = depth.add(layout.constrain(y_BTD, ACTIVATION))

        h_BTD, ffn_weights_NBT = depth.read(self.ffn_res)
        y_BTD, ffn_report = self._feed_forward(self.ffn_norm(h_BTD), segment_ids_BT, layout, collect)
        depth = depth.add(layout.constrain(y_BTD, ACTIVATION))

        report = {**mixer_report, **ffn_report}
        if collect:
            report |= depth_report(mixer_weights_NBT, ffn_weights_NBT, depth.latest_BTD, segment_ids_BT >= 0)
        return depth, report

    def _feed_forward(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, collect: bool) -> tuple[jax.Array, Report]:
        if isinstance(self.ffn, FeedForward):
            return self.ffn(x_BTD), {}
        return self.ffn(x_BTD, segment_ids_BT, layout, collect=collect)


class Trace(NamedTuple):
    """What happens inside, for tests: what each layer leaves [L, B, T, D] (the running sum, or with full Attention Residuals the sum of its
    own two outputs), the sources that no later layer changes [N, B, T, D] and their number at each layer (the embedding counts), the last
    hidden state [B, T, D], chosen experts [MoE layers, B, T, k].
    """

    running_sums: jax.Array
    blocks: jax.Array
    num_blocks: tuple[int, ...]
    final_hidden: jax.Array
    expert_ids: jax.Array


class DecoderOutput(NamedTuple):
    """Logits [B, T, V] in at least float32, and small arrays of the layers that have them, in layer order. Counts and means are over
    real tokens.

    Always: `expert_load` int32 [MoE layers, E]; `max_logit` [MLA layers, H]. With `collect` also: `histogram` int32 [MoE layers, row
    shards, E, bins] under quantile balancing, not yet summed over the shards; `router_entropy` and `bias_spread` [MoE layers];
    `source_weights_mixer` and `source_weights_ffn` [L, N], zero beyond a layer's own sources, unless the depth is a plain residual;
    `kda_log_decay` and `kda_at_bound` [KDA layers]; `finite` bool [L].
    """

    logits_BTV: jax.Array
    aux: Report
    trace: Trace | None = None


class Decoder(nnx.Module):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config)
        self.groups = nnx.List(
            nnx.List(stacks.stacked(DecoderLayer(config, group.layer(0, position)), group.repeats) for position in range(group.unit))
            for group in stacks.groups(config)
        )
        self.output_res, self.norm, self.head = mixing_site(config), Norm(config), Head(config)

    def __call__(
        self, tokens_BT: jax.Array, segment_ids_BT: jax.Array, *, layout: Layout, collect: bool = False, trace: bool = False
    ) -> DecoderOutput:
        """Int32 tokens and segment ids [B, T] (documents >= 0, padding -1) -> `DecoderOutput`.

        `collect` asks for the reports that only training reads. `trace` keeps what every layer leaves behind and runs the layers one by
        one. Raises ValueError on other shapes.
        """
        for name, array in (("tokens", tokens_BT), ("segment_ids", segment_ids_BT)):
            if array.ndim != 2 or array.shape != tokens_BT.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise ValueError(f"{name} must be an integer array [B, T] like tokens {tokens_BT.shape}, got {array.dtype}{array.shape}")
        depth = begin(self.config, layout.constrain(self.embed(tokens_BT), ACTIVATION))
        reports: list[Report] = []
        left: list[jax.Array] = []
        num_kept: list[int] = []
        groups = iter(self.groups)
        for number, block in enumerate(stacks.plan(self.config)):
            depth = depth.close_block() if number else depth
            for group in block:
                layers = next(groups)
                if trace:
                    depth, group_reports, group_left = _trace_group(layers, group, depth, segment_ids_BT, layout, collect)
                    reports, left, num_kept = reports + group_reports, left + group_left, num_kept + [len(depth.kept)] * len(group_left)
                else:
                    depth, report = _run_group(layers, group, self.config.remat, depth, segment_ids_BT, layout, collect)
                    reports.append(report)
        hidden_BTD = self.norm(depth.read(self.output_res)[0])
        aux = join(reports, segment_ids_BT >= 0)
        expert_ids = aux.pop("expert_ids", jnp.zeros((0, *tokens_BT.shape, 0), jnp.int32))
        output = DecoderOutput(self.head(hidden_BTD), aux)
        if not trace:
            return output
        kept = jnp.stack([value_BTD for value_BTD, _ in depth.kept]) if depth.kept else jnp.zeros((0, *hidden_BTD.shape))
        return output._replace(trace=Trace(jnp.stack(left), kept, tuple(num_kept), hidden_BTD, expert_ids))


class Embedding(nnx.Module):
    """A row per token id."""

    def __init__(self, config: ModelConfig):
        self.compute = jnp.dtype(config.dtypes.compute)
        self.embedding = weight((config.vocab_size, config.d_model), ("vocab", "embed"), config)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Ids [B, T] -> [B, T, D] in the compute dtype."""
        return self.embedding[...][tokens_BT].astype(self.compute)


class Head(nnx.Module):
    """Logits over the vocabulary, untied from the embedding."""

    def __init__(self, config: ModelConfig):
        self.kernel = weight((config.d_model, config.vocab_size), ("embed", "vocab"), config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, V], accumulated and kept in at least float32."""
        dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
        return jnp.einsum("btd,dv->btv", x_BTD, self.kernel[...].astype(x_BTD.dtype), preferred_element_type=dtype)


def _run_group(
    layers: Sequence[Any],
    group: stacks.Group,
    remat: str,
    depth: Depth,
    segment_ids_BT: jax.Array,
    layout: Layout,
    collect: bool,
) -> tuple[Depth, Report]:
    """Scans the repeats of a pattern over the depth's carry; all else of the depth is closed over. Reports in layer order."""
    split = [graph_and_params(layer) for layer in layers]

    def run_layer(graphdef: Any, params: Any, carry: Carry) -> tuple[Carry, Report]:
        after, report = nnx.merge(graphdef, params)(depth.with_carry(carry), segment_ids_BT, layout, collect)
        return after.carry, {name: value for name, value in report.items() if name != "expert_ids"}

    def run_pattern(carry: Carry, params: Sequence[Any]) -> tuple[Carry, list[Report]]:
        reports = []
        for (graphdef, _), layer_params in zip(split, params, strict=True):
            layer = partial(run_layer, graphdef)
            if remat == "layer":
                layer = jax.checkpoint(layer, prevent_cse=group.repeats == 1)  # a scan keeps the two passes apart by itself
            carry, report = layer(layer_params, carry)
            reports.append(report)
        return carry, reports

    params = [params for _, params in split]
    if group.repeats == 1:
        carry, reports = run_pattern(depth.carry, jax.tree.map(lambda leaf: leaf[0], params))
        reports = jax.tree.map(lambda value: value[None], reports)
    else:
        carry, reports = jax.lax.scan(run_pattern, depth.carry, params)
    return depth.with_carry(carry), interleave(reports)


def _trace_group(
    layers: Sequence[Any], group: stacks.Group, depth: Depth, segment_ids_BT: jax.Array, layout: Layout, collect: bool
) -> tuple[Depth, list[Report], list[jax.Array]]:
    """Runs a group layer by layer and keeps what each leaves."""
    reports, left = [], []
    split = [graph_and_params(layer) for layer in layers]
    for repeat in range(group.repeats):
        for graphdef, params in split:
            layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, r=repeat: leaf[r], params))
            after, report = layer(depth, segment_ids_BT, layout, collect)
            left.append(after.latest_BTD)
            depth = depth.with_carry(after.carry)
            reports.append({name: value[None] for name, value in report.items()})
    return depth, reports, left
