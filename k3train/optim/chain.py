"""The one Optax chain: clip, then the update that each parameter's label names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import optax

from k3train.config import OptimizerConfig, ScheduleConfig
from k3train.optim.labels import ADAMW, ADAMW_NO_DECAY, FROZEN, labels
from k3train.optim.schedules import warmup_cosine


def build_optimizer(config: OptimizerConfig, schedule: ScheduleConfig, axes: Any) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm -> AdamW with or without decay, or no update, by label. Nothing comes after the labels.

    Args:
      config: rates and limits of the updates.
      schedule: course of the learning rate, which multiplies the decay too.
      axes: tree of tuples of logical axis names, shaped like the parameters.

    Returns:
      a transformation whose `update` gives what is added to the parameters.
    """
    learning_rate = warmup_cosine(config.peak_lr, schedule)

    def adamw(weight_decay: float) -> optax.GradientTransformation:
        return optax.adamw(learning_rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=weight_decay)

    updates: dict[Hashable, optax.GradientTransformation] = {
        ADAMW: adamw(config.weight_decay),
        ADAMW_NO_DECAY: adamw(0.0),
        FROZEN: optax.set_to_zero(),
    }
    chain = optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(updates, labels(axes)))
    return optax.with_extra_args_support(chain)
