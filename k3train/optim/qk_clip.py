"""QK-Clip: a head whose attention logits grow too large has its query and key weights scaled down.

From K2 (arXiv 2507.20534); K3 keeps it (report 3.3).
Legend: H heads, K a head's channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.optim.paths import Path, by_path, map_by_path, require

QUERY, KEY = "q_up", "k_up"


def qk_clip(limit: float) -> optax.GradientTransformationExtraArgs:
    """Last link of a chain: turns an update u of W into u + (factor - 1)(W + u), so that W + u is scaled.

    With gamma = min(1, limit / max logit) per head: queries and keys of the part without positions by sqrt(gamma), queries of the
    shared (rotary) part by gamma, whose key serves all heads and stays. Query columns are [nope | rope]; the width of
    nope is the keys'. KDA needs none of it: its queries and keys have length one.

    Its `update` takes `max_logits`, a dict from the path of a `q_up` [..., rank, H, nope + rope] to the largest scaled logits
    [..., H] of the step; its sibling `k_up` [..., rank, H, nope] is found by path. An absent path is not clipped, nor is a head
    without a finite logit.
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: Any, state: optax.EmptyState, params: Any = None, *, max_logits: Mapping[Path, jax.Array], **_: Any
    ) -> tuple[Any, optax.EmptyState]:
        leaves = by_path(params)
        require("largest logits", max_logits, [path for path in leaves if path[-1] == QUERY])

        def clip(path: Path, u: jax.Array, w: jax.Array) -> jax.Array:
            query = (*path[:-1], QUERY)
            if path[-1] not in (QUERY, KEY) or query not in max_logits:
                return u
            gamma_H1 = head_factors(max_logits[query], limit)[..., None]
            nope = leaves[(*path[:-1], KEY)].shape[-1]
            factor_HK = jnp.where(jnp.arange(w.shape[-1]) < nope, jnp.sqrt(gamma_H1), gamma_H1)
            factor = jnp.expand_dims(factor_HK, -3)  # the same for every row of the rank
            return jnp.where(factor < 1.0, u + (factor - 1.0) * (w + u), u).astype(u.dtype)

        return map_by_path(clip, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]  # the type of `update` there has no extra arguments


def head_factors(max_logit_H: jax.Array, limit: float) -> jax.Array:
    """gamma = min(1, limit / max logit) in at least float32; 1 where there is no finite logit."""
    max_logit_H = max_logit_H.astype(jnp.promote_types(max_logit_H.dtype, jnp.float32))
    above = jnp.isfinite(max_logit_H) & (max_logit_H > limit)
    return jnp.where(above, limit / jnp.where(above, max_logit_H, 1.0), 1.0)
