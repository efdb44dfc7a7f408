"""One training step: microbatches -> loss and gradients -> optimizer -> new state and metrics.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.data.batch import Batch
from k3train.optim.schedules import Schedule
from k3train.train.loss import cross_entropy
from k3train.train.state import TrainState, Tree

Aux = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Forward = Callable[[Tree, Batch], tuple[jax.Array, Aux]]
"""(parameters, rows) -> (logits [B, T, V], small arrays per layer)."""

OVER_MICROBATCHES: dict[str, Callable[..., jax.Array]] = {"expert_load": jnp.sum, "max_logit": jnp.max}
"""How the decoder's side outputs of several microbatches make those of the step; others are left out."""


def build_train_step(
    forward: Forward,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: Schedule,
    *,
    microbatches: int = 1,
    row_shards: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Makes the step, a pure function to be jitted with the state donated.

    The loss is the mean over all real targets of the batch: each microbatch adds its sum over the step's total count, so that any
    number of microbatches gives the gradient of the whole batch, however its targets are spread.

    Args:
      forward: the model.
      optimizer: the chain.
      learning_rate: for the metrics; the chain has its own.
      microbatches: parts in which the rows are run one after another; divides B.
      row_shards: devices that the rows are spread over; every microbatch takes an equal share of each device's rows.

    Returns:
      (state, batch) -> (state, metrics). Metrics are float32 scalars `loss` (nats per target), `grad_norm` (before the clip),
      `learning_rate`, `tokens` (real targets), and per layer what the decoder reports.
    """

    def loss(params: Tree, rows: Batch, total: jax.Array) -> tuple[jax.Array, Aux]:
        logits_BTV, aux = forward(params, rows)
        nats, _ = cross_entropy(logits_BTV, rows.targets, rows.loss_mask)
        return nats / total, {name: aux[name] for name in OVER_MICROBATCHES if name in aux}

    gradient = jax.value_and_grad(loss, has_aux=True)

    def accumulate(params: Tree, batch: Batch, total: jax.Array) -> tuple[jax.Array, Aux, Tree]:
        if microbatches == 1:
            (mean, aux), grads = gradient(params, batch, total)
            return mean, aux, grads

        def add(sums: tuple[jax.Array, Tree], rows: Batch) -> tuple[tuple[jax.Array, Tree], Aux]:
            (part, aux), grads = gradient(params, rows, total)
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, (part, grads)), aux

        wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        (mean, grads), aux = jax.lax.scan(add, (jnp.zeros_like(total), wide), split_rows(batch, microbatches, row_shards))
        return mean, {name: OVER_MICROBATCHES[name](value, axis=0) for name, value in aux.items()}, grads

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        targets = jnp.sum(batch.loss_mask)
        mean, aux, grads = accumulate(state.params, batch, jnp.maximum(targets, 1.0))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        metrics = {
            "loss": mean,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": learning_rate(state.step),
            "tokens": targets,
            **layer_metrics(aux),
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), metrics

    return train_step


def layer_metrics(aux: Aux) -> Metrics:
    """What is worth writing down of the decoder's side outputs, one number per layer."""
    metrics = {}
    if "expert_load" in aux:
        load = aux["expert_load"].astype(jnp.float32)
        metrics["expert_load_max_over_mean"] = jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9)
    if "max_logit" in aux:
        metrics["max_logit"] = jnp.max(aux["max_logit"], axis=-1)
    return metrics


def split_rows(batch: Batch, parts: int, shards: int = 1) -> Batch:
    """[B, ...] -> [parts, B / parts, ...]; each part takes an equal share of the rows of each of `shards` equal blocks of rows.

    Rows lie on devices in such blocks, so no row changes its device.
    """

    def split(x: Any) -> Any:
        rows = x.shape[0] // (parts * shards)
        return x.reshape(shards, parts, rows, *x.shape[1:]).swapaxes(0, 1).reshape(parts, shards * rows, *x.shape[1:])

    return jax.tree.map(split, batch)
