"""Learning rates as pure functions of the number of updates already made."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from k3train.config import ScheduleConfig

Schedule = Callable[[ArrayLike], jax.Array]


def warmup_cosine(peak: float, config: ScheduleConfig) -> Schedule:
    """Linear warm-up to `peak`, then a cosine down to `final_fraction * peak` (report 3.3).

    The first update already moves (a share 1/warm-up of the peak), the last of `config.steps` updates has the final rate, and so
    has every later one. Returns a function from the int update count to a float32 scalar.
    """
    warmup = round(config.warmup_fraction * config.steps)
    decay = max(config.steps - warmup, 1)

    def learning_rate(count: ArrayLike) -> jax.Array:
        update = jnp.asarray(count, jnp.float32) + 1.0
        rising = update / max(warmup, 1)
        progress = jnp.clip((update - warmup) / decay, 0.0, 1.0)
        falling = config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(update < warmup, rising, falling)

    return learning_rate
