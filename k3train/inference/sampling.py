"""The choice of the next token.  Legend: B batch, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose; hashable, so that it can be static in a compiled program.

    The order is: divide the logits by the temperature, keep the `top_k` best, and of these, with their probabilities made to sum to one,
    the fewest whose sum reaches `top_p`.
    """

    temperature: float = 1.0
    """0 takes the best token."""
    top_k: int | None = None
    top_p: float | None = None


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids int32 [B], each row drawn with its own random key (and so the same in any batch)."""
    if sampling.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    draw = jax.vmap(jax.random.categorical)
    if sampling.top_k is None and sampling.top_p is None:
        return draw(keys_B, logits_BV).astype(jnp.int32)
    ranked_BV, ids_BV = jax.lax.top_k(logits_BV, min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1]))
    if sampling.top_p is not None:
        p_BV = jax.nn.softmax(ranked_BV, axis=-1)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        ranked_BV = jnp.where((before_BV < sampling.top_p).at[:, 0].set(True), ranked_BV, -jnp.inf)
    return jnp.take_along_axis(ids_BV, draw(keys_B, ranked_BV)[:, None], axis=-1)[:, 0].astype(jnp.int32)
