"""The decoder: one mixer and one feed-forward block per layer, joined by Attention Residuals (report 2, Fig. 2).

The three axes at first sight: `mixer` mixes along the sequence, `AttentionResidual` along the depth, `ffn` along the
width.
Legend: B batch, T tokens, D model, V vocabulary, N completed blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.models import stacks
from k3train.models.attention_residuals import AttentionResidual, Source, source
from k3train.models.feed_forward import FeedForward
from k3train.models.kda import KimiDeltaAttention
from k3train.models.latent_moe import LatentMoE
from k3train.models.layout import Layout
from k3train.models.mla import GatedMLA
from k3train.models.norms import rms_norm
from k3train.models.parameters import graph_and_params, ones, weight

Report = dict[str, jax.Array]
ACTIVATION = ("batch", "tokens", "embed")


class Norm(nnx.Module):
    """RMSNorm with its weight."""

    def __init__(self, config: ModelConfig):
        self.eps = config.norm_eps
        self.scale = ones((config.d_model,), ("norm",), config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """x [B, T, D] -> the same shape and dtype."""
        return rms_norm(x_BTD, self.scale[...], self.eps)


class DecoderLayer(nnx.Module):
    """layer(parameters, carry): the carry is (completed blocks, running sum of the block under way)."""

    def __init__(self, config: ModelConfig, layer: int):
        self.mixer_res, self.mixer_norm = AttentionResidual(config), Norm(config)
        self.mixer = KimiDeltaAttention(config) if config.mixers[layer] == "kda" else GatedMLA(config)
        self.ffn_res, self.ffn_norm = AttentionResidual(config), Norm(config)
        self.ffn = LatentMoE(config) if config.feed_forwards[layer] == "latent_moe" else FeedForward(config, config.dense_dim)

    def __call__(
        self, blocks: tuple[Source, ...], running_BTD: jax.Array, starts_block: bool | jax.Array, segment_ids_BT: jax.Array, layout: Layout
    ) -> tuple[jax.Array, Report]:
        """Adds both sublayers' outputs to the running sum, which is zero where the layer starts a block.

        A starting layer's mixer sees completed blocks only (report eq. 10, first case). Returns the sum and the layer's
        report of small arrays.
        """
        h_BTD = self.mixer_res(blocks, running_BTD, jnp.logical_not(starts_block))
        y_BTD, mixer_report = self.mixer(self.mixer_norm(h_BTD), segment_ids_BT, layout)
        running_BTD = layout.constrain(running_BTD + y_BTD, ACTIVATION)

        h_BTD = self.ffn_norm(self.ffn_res(blocks, running_BTD))
        y_BTD, ffn_report = self.ffn(h_BTD, segment_ids_BT, layout) if isinstance(self.ffn, LatentMoE) else (self.ffn(h_BTD), {})
        return layout.constrain(running_BTD + y_BTD, ACTIVATION), {**mixer_report, **ffn_report}


class Trace(NamedTuple):
    """What happens inside, for tests: running sums [L, B, T, D], blocks [N, B, T, D], number of blocks after each layer
    (the embedding counts), last hidden state [B, T, D], chosen experts [MoE layer, B, T, k].
    """

    running_sums: jax.Array
    blocks: jax.Array
    num_blocks: tuple[int, ...]
    final_hidden: jax.Array
    expert_ids: jax.Array


class DecoderOutput(NamedTuple):
    """Logits [B, T, V] in at least float32, and per-layer reports stacked by layer: `expert_load` int32 [MoE layers, E],
    `max_logit` [MLA layers, H].
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
        self.output_res, self.norm, self.head = AttentionResidual(config), Norm(config), Head(config)

    def __call__(self, tokens_BT: jax.Array, segment_ids_BT: jax.Array, *, layout: Layout, trace: bool = False) -> DecoderOutput:
        """Int32 tokens and segment ids [B, T] (documents >= 0, padding -1) -> `DecoderOutput`.

        `trace` keeps what every layer leaves behind and runs the layers one by one. Raises ValueError on other shapes.
        """
        for name, array in (("tokens", tokens_BT), ("segment_ids", segment_ids_BT)):
            if array.ndim != 2 or array.shape != tokens_BT.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise ValueError(f"{name} must be an integer array [B, T] like tokens {tokens_BT.shape}, got {array.dtype}{array.shape}")
        embedded_BTD = layout.constrain(self.embed(tokens_BT), ACTIVATION)
        blocks = (source(embedded_BTD, self.config.norm_eps),)
        running_BTD = jnp.zeros_like(embedded_BTD)
        reports: dict[int, Report] = {}
        sums: list[jax.Array] = []
        num_blocks: list[int] = []
        plan, index = stacks.plan(self.config), 0
        for number, block in enumerate(plan):
            if number:
                blocks, running_BTD = (*blocks, source(running_BTD, self.config.norm_eps)), jnp.zeros_like(running_BTD)
            for group in block:
                run = _trace_group if trace else _run_group
                running_BTD, layer_reports, layer_sums = run(
                    self.groups[index], group, self.config, blocks, running_BTD, segment_ids_BT, layout, group is block[0]
                )
                reports |= layer_reports
                sums += layer_sums
                num_blocks += [len(blocks)] * (group.unit * group.repeats)
                index += 1
        hidden_BTD = self.norm(self.output_res(blocks, running_BTD))
        aux = _stack_reports(reports)
        expert_ids = aux.pop("expert_ids", jnp.zeros((0, *tokens_BT.shape, 0), jnp.int32))
        traced = (
            Trace(jnp.stack(sums), jnp.stack([block.value_BTD for block in blocks]), tuple(num_blocks), hidden_BTD, expert_ids)
            if trace
            else None
        )
        return DecoderOutput(self.head(hidden_BTD), aux, traced)


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
    layers: Any,
    group: stacks.Group,
    config: ModelConfig,
    blocks: tuple[Source, ...],
    running_BTD: jax.Array,
    segment_ids_BT: jax.Array,
    layout: Layout,
    opens_block: bool,
) -> tuple[jax.Array, dict[int, Report], list[jax.Array]]:
    """Scans the repeats of a pattern; completed blocks are closed over, so that each is kept once."""
    split = [graph_and_params(layer) for layer in layers]
    graphdefs, params = [graphdef for graphdef, _ in split], [params for _, params in split]

    def run_layer(graphdef: Any, params: Any, running_BTD: jax.Array, starts_block: jax.Array) -> tuple[jax.Array, Report]:
        running_BTD, report = nnx.merge(graphdef, params)(blocks, running_BTD, starts_block, segment_ids_BT, layout)
        report.pop("expert_ids", None)
        return running_BTD, report

    def run_pattern(running_BTD: jax.Array, repeat: tuple[Any, jax.Array]) -> tuple[jax.Array, list[Report]]:
        params, starts_block = repeat
        reports = []
        for position, (graphdef, layer_params) in enumerate(zip(graphdefs, params, strict=True)):
            layer = partial(run_layer, graphdef)
            if config.remat == "layer":
                layer = jax.checkpoint(layer, prevent_cse=group.repeats == 1)  # a scan keeps the two passes apart by itself
            running_BTD, report = layer(layer_params, running_BTD, starts_block & (position == 0))
            reports.append(report)
        return running_BTD, reports

    starts_R = (jnp.arange(group.repeats) == 0) & opens_block
    if group.repeats == 1:
        running_BTD, reports = run_pattern(running_BTD, (jax.tree.map(lambda leaf: leaf[0], params), starts_R[0]))
        return running_BTD, {group.layer(0, position): report for position, report in enumerate(reports)}, []
    running_BTD, reports_R = jax.lax.scan(run_pattern, running_BTD, (params, starts_R))
    by_layer = {
        group.layer(repeat, position): {name: value[repeat] for name, value in report.items()}
        for position, report in enumerate(reports_R)
        for repeat in range(group.repeats)
    }
    return running_BTD, by_layer, []


def _trace_group(
    layers: Any,
    group: stacks.Group,
    config: ModelConfig,
    blocks: tuple[Source, ...],
    running_BTD: jax.Array,
    segment_ids_BT: jax.Array,
    layout: Layout,
    opens_block: bool,
) -> tuple[jax.Array, dict[int, Report], list[jax.Array]]:
    """Runs a group layer by layer and keeps the running sum after each."""
    reports, sums = {}, []
    split = [graph_and_params(layer) for layer in layers]
    for repeat in range(group.repeats):
        for position, (graphdef, params) in enumerate(split):
            layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, r=repeat: leaf[r], params))
            starts = opens_block and repeat == 0 and position == 0
            running_BTD, reports[group.layer(repeat, position)] = layer(blocks, running_BTD, starts, segment_ids_BT, layout)
            sums.append(running_BTD)
    return running_BTD, reports, sums


def _stack_reports(reports: dict[int, Report]) -> Report:
    names = sorted({name for report in reports.values() for name in report})
    return {name: jnp.stack([reports[layer][name] for layer in sorted(reports) if name in reports[layer]]) for name in names}
