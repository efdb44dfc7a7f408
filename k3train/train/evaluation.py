"""Loss on held-out text.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.data.batch import Batch
from k3train.train.loss import cross_entropy
from k3train.train.state import Tree
from k3train.train.step import Forward


class Sums(NamedTuple):
    """Totals over rows: nats, targets, and targets that stand for a byte of text."""

    nats: jax.Array
    targets: jax.Array
    bytes: jax.Array


class Heldout(NamedTuple):
    """Scores over every real target of the batches."""

    loss: float
    """Nats per target."""
    bits_per_byte: float
    """All nats, those of document boundaries too, over the bytes of the text."""


def build_eval_step(forward: Forward, boundary_id: int) -> Callable[[Tree, Batch], Sums]:
    """(parameters, batch) -> sums over the batch's real targets; a pure function to be jitted.

    `boundary_id` is the token that ends a document: a target, but no byte. All other tokens are bytes.
    """

    def eval_step(params: Tree, batch: Batch) -> Sums:
        logits_BTV, _ = forward(params, batch)
        nats, targets = cross_entropy(logits_BTV, batch.targets, batch.loss_mask)
        return Sums(nats, targets, jnp.sum(jnp.where(batch.targets != boundary_id, batch.loss_mask, 0.0)))

    return eval_step


def evaluate(eval_step: Callable[[Tree, Batch], Sums], params: Tree, batches: Iterable[Batch]) -> Heldout:
    """Scores every batch and waits for the numbers once, at the end. Adds up in float64 on the host."""
    parts = jax.device_get([eval_step(params, batch) for batch in batches])
    nats, targets, text = (math.fsum(float(part[i]) for part in parts) for i in range(3))
    return Heldout(loss=nats / max(targets, 1.0), bits_per_byte=nats / math.log(2.0) / max(text, 1.0))
