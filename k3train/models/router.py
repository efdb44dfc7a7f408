"""Which experts a token goes to (report 2.3, eq. 11), and what the balancing of their load reads (2.3.3, App. D).

Legend: B batch, T tokens, D model, E experts, k active experts, S shards of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.config import MoEConfig
from k3train.models.layout import Layout, router_logits
from k3train.models.reports import Report, row_sums


class Routing(NamedTuple):
    """A token's experts, by falling biased score."""

    expert_ids_BTk: jax.Array
    """int32."""
    weights_BTk: jax.Array
    """Sum to `routed_scaling`."""
    cutoff_BT: jax.Array | None
    """The largest biased score that was not chosen; None where every expert is."""


def router_scores(x_BTD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """sigmoid(x W) [B, T, E], exact in at least float32."""
    return jax.nn.sigmoid(router_logits(x_BTD, router_DE))


def route(scores_BTE: jax.Array, bias_E: jax.Array, moe: MoEConfig, layout: Layout) -> Routing:
    """Chooses the top k of score + bias, weighs them by the scores alone: p_j = scaling s_j / sum_chosen s (report eq. 11).

    The bias gets no gradient. One top-(k + 1) gives the choice and the cutoff.
    """
    k, num_experts = moe.experts_per_token, moe.num_experts
    biased_BTE = jax.lax.stop_gradient(scores_BTE + bias_E.astype(scores_BTE.dtype))
    top_BTk, ids_BTk = layout.top_k(biased_BTE, min(k + 1, num_experts))
    ids_BTk = in_turn(scores_BTE.shape[:2], moe) if moe.force_balanced else ids_BTk[..., :k]
    chosen_BTk = jnp.take_along_axis(scores_BTE, ids_BTk, axis=-1)
    weights_BTk = chosen_BTk / (jnp.sum(chosen_BTk, axis=-1, keepdims=True) + 1e-20)
    return Routing(ids_BTk, weights_BTk * moe.routed_scaling, top_BTk[..., k] if k < num_experts else None)


def in_turn(shape_BT: tuple[int, ...], moe: MoEConfig) -> jax.Array:
    """Experts t k, t k + 1, ... modulo their number for the t-th token of the batch; int32 [B, T, k]."""
    batch, tokens = shape_BT
    row_BT = jnp.arange(batch, dtype=jnp.int32)[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)
    choice_k = jnp.arange(moe.experts_per_token, dtype=jnp.int32)
    return (row_BT[..., None] % moe.num_experts * moe.experts_per_token + choice_k) % moe.num_experts


def choose_experts(
    x_BTD: jax.Array, router_DE: jax.Array, bias_E: jax.Array, moe: MoEConfig, segment_ids_BT: jax.Array, layout: Layout, collect: bool
) -> tuple[Routing, Report]:
    """Routes every token; both kinds of expert layer call this. The report counts real tokens only and carries no gradient.

    It has `expert_load` int32 [B, E] and `expert_ids` int32 [B, T, k]; with `collect` also `router_entropy` [B], the sum over the tokens
    of the entropy of s / sum(s) in nats, `bias_spread`, and for quantile balancing `histogram` int32 [S, E, bins] of cutoff - score, the
    bias that would have let the expert in (absent where every expert is chosen: then there is nothing to balance).
    """
    scores_BTE = router_scores(x_BTD, router_DE)
    bias_E = layout.constrain(bias_E, ("experts",))  # whole on every device, so that its range needs no further exchange
    routing = route(scores_BTE, bias_E, moe, layout)
    scores_BTE, bias_E = jax.lax.stop_gradient((scores_BTE, bias_E))
    real_BT = segment_ids_BT >= 0
    report = {"expert_load": expert_load(routing.expert_ids_BTk, real_BT, moe.num_experts), "expert_ids": routing.expert_ids_BTk}
    if not collect:
        return routing, report
    share_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    report["router_entropy"] = row_sums(jnp.sum(jax.scipy.special.entr(share_BTE), axis=-1), real_BT)
    low, spread = jnp.min(bias_E) - 1, jnp.max(bias_E) - jnp.min(bias_E)
    report["bias_spread"] = spread
    if moe.balancing == "quantile" and routing.cutoff_BT is not None:
        width = (spread + 2) / moe.histogram_bins  # scores lie in (0, 1), so every value falls inside
        report["histogram"] = layout.router_histogram(scores_BTE, routing.cutoff_BT, real_BT, low, width, bins=moe.histogram_bins)
    return routing, report


def expert_load(expert_ids_BTk: jax.Array, real_BT: jax.Array, num_experts: int) -> jax.Array:
    """int32 [B, E]: how often the real tokens of each row chose each expert. Row by row, so that devices need not meet here."""

    def of_row(ids_Tk: jax.Array, real_T: jax.Array) -> jax.Array:
        return jnp.zeros(num_experts, jnp.int32).at[ids_Tk].add(real_T[:, None].astype(jnp.int32))

    return jax.vmap(of_row)(expert_ids_BTk, real_BT)
