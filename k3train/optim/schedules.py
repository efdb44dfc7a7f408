"""Learning rates as pure functions of the number of updates already made."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from k3train.config import ScheduleConfig, ScheduleKind

Schedule = Callable[[ArrayLike], jax.Array]


def learning_rate(peak: float, kind: ScheduleKind, config: ScheduleConfig) -> Schedule:
    """Linear warm-up to `peak`, then the course that `kind` names, down to `final_fraction * peak`.

    `cosine` falls from the end of the warm-up (report 3.3); `wsd` (warm-up, stable, decay) stays and falls linearly over the last
    `decay_fraction` of the steps; `constant` stays. The first update already moves (a share 1/warm-up of the peak), the last of
    `config.steps` updates has the final rate, and so has every later one.

    Returns:
      a function from the int count of updates already applied to a float32 scalar.
    """
    warmup = round(config.warmup_fraction * config.steps)
    start = warmup if kind == "cosine" else max(warmup, config.steps - round(config.decay_fraction * config.steps))
    length = max(config.steps - start, 1)
    low = 1.0 if kind == "constant" else config.final_fraction

    def rate(count: ArrayLike) -> jax.Array:
        update = jnp.asarray(count, jnp.float32) + 1.0
        rising = update / max(warmup, 1)
        progress = jnp.clip((update - start) / length, 0.0, 1.0)
        fallen = 0.5 * (1.0 + jnp.cos(jnp.pi * progress)) if kind == "cosine" else 1.0 - progress
        return peak * jnp.where(update < warmup, rising, low + (1.0 - low) * fallen)

    return rate
