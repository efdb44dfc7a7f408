"""One training step: microbatches -> loss, gradients and router counts -> optimizer -> new state and metrics.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from k3train.data.batch import Batch
from k3train.optim import FiniteGateState, Schedule, global_norm
from k3train.train.loss import cross_entropy
from k3train.train.state import TrainState, Tree

Aux = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Forward = Callable[[Tree, Batch], tuple[jax.Array, Aux]]
"""(parameters, rows) -> (logits [B, T, V], small arrays per layer)."""
Evidence = dict[str, Any]
"""What the optimizer reads beside gradients: `histograms`, `loads` and `max_logits`, by the path of the parameter that they concern."""

COUNTS = ("histogram", "expert_load")
"""Side outputs that add up over microbatches; they may be large, and are summed on the way."""
OVER_MICROBATCHES: dict[str, Callable[..., jax.Array]] = {
    "max_logit": jnp.max,
    "finite": jnp.all,
    **dict.fromkeys(
        ("router_entropy", "bias_spread", "kda_log_decay", "kda_at_bound", "source_weights_mixer", "source_weights_ffn"), jnp.mean
    ),
}
"""How the other side outputs of several microbatches make those of the step; what is named nowhere is left out."""


def build_train_step(
    forward: Forward,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    evidence: Callable[[Aux], Evidence],
    report: Callable[[Aux, Tree, Tree], Metrics],
    learning_rates: Mapping[str, Schedule],
    microbatches: int = 1,
    row_shards: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Makes the step, a pure function to be jitted with the state donated.

    The loss is the mean over all real targets of the batch: each microbatch adds its sum over the step's total count, so that any
    number of microbatches gives the gradient of the whole batch, however its targets are spread. Where the loss or a gradient is not
    finite, the optimizer's gate leaves everything but the counters as it was, and the step number goes on to the next batch.

    Args:
      forward: the model.
      optimizer: the chain, whose state is a `FiniteGateState`.
      evidence: the step's side outputs as the chain takes them.
      report: (side outputs, gradients, updates) -> figures for the metrics.
      learning_rates: for the metrics, by name; the chain has its own.
      microbatches: parts in which the rows are run one after another; divides B.
      row_shards: devices that the rows are spread over; every microbatch takes an equal share of each device's rows.

    Returns:
      (state, batch) -> (state, metrics). Metrics are float32 scalars `loss` (nats per target), `grad_norm` (before the clip),
      `tokens` (real targets), the learning rates, int32 `skipped_steps` (all so far) and `skipped_in_a_row`, and what `report` gives.
    """

    def loss(params: Tree, rows: Batch, total: jax.Array) -> tuple[jax.Array, Aux]:
        logits_BTV, aux = forward(params, rows)
        nats, _ = cross_entropy(logits_BTV, rows.targets, rows.loss_mask)
        return nats / total, {name: aux[name] for name in (*COUNTS, *OVER_MICROBATCHES) if name in aux}

    gradient = jax.value_and_grad(loss, has_aux=True)

    def accumulate(params: Tree, batch: Batch, total: jax.Array) -> tuple[jax.Array, Aux, Tree]:
        if microbatches == 1:
            (mean, aux), grads = gradient(params, batch, total)
            return mean, aux, grads

        def add(sums: tuple[jax.Array, Aux, Tree], rows: Batch) -> tuple[tuple[jax.Array, Aux, Tree], Aux]:
            (part, aux), grads = gradient(params, rows, total)
            counts = {name: aux.pop(name) for name in COUNTS if name in aux}
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, (part, counts, grads)), aux

        parts = split_rows(batch, microbatches, row_shards)
        (_, aux_shapes), _ = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts), total)
        counts = {name: jnp.zeros(aux_shapes[name].shape, aux_shapes[name].dtype) for name in COUNTS if name in aux_shapes}
        wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        (mean, counts, grads), aux = jax.lax.scan(add, (jnp.zeros_like(total), counts, wide), parts)
        return mean, {**counts, **{name: OVER_MICROBATCHES[name](value, axis=0) for name, value in aux.items()}}, grads

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        targets = jnp.sum(batch.loss_mask)
        mean, aux, grads = accumulate(state.params, batch, jnp.maximum(targets, 1.0))
        updates, new = optimizer.update(grads, state.optimizer, state.params, loss=mean, **evidence(aux))
        gate = cast(FiniteGateState, new)
        metrics = {
            "loss": mean,
            "grad_norm": global_norm(grads),
            "tokens": targets,
            "skipped_steps": gate.skipped,
            "skipped_in_a_row": gate.consecutive,
            **{name: rate(state.optimizer.applied) for name, rate in learning_rates.items()},
            **report(aux, grads, updates),
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), gate), metrics

    return train_step


def split_rows(batch: Batch, parts: int, shards: int = 1) -> Batch:
    """[B, ...] -> [parts, B / parts, ...]; each part takes an equal share of the rows of each of `shards` equal blocks of rows.

    Rows lie on devices in such blocks, so no row changes its device.
    """

    def split(x: Any) -> Any:
        rows = x.shape[0] // (parts * shards)
        return x.reshape(shards, parts, rows, *x.shape[1:]).swapaxes(0, 1).reshape(parts, shards * rows, *x.shape[1:])

    return jax.tree.map(split, batch)
