"""Router biases that even the experts' load, without a gradient (report 2.3.3, App. C and D).

An expert's required bias for a token is r = cutoff - score, where the cutoff is the token's (k+1)-th largest biased score: the expert is
chosen where r < bias.
Legend: m real tokens of the optimizer step, S tokens, E experts, k active experts per token, N histogram bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.config import Balancing
from k3train.optim.paths import Path, by_path, map_by_path, require


def solve(histogram_EN: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """The bias under which each expert would be chosen by q = m k / E tokens: eq. 14 from a histogram of r, then centred.

    The estimate lies within one bin width of the ceil(q)-th smallest r. m k is the sum of the loads, so that q is exact, and padding
    counts nowhere. The lower end of the range, min(bias) - 1, goes with the mean.

    Args:
      histogram_EN: int32 [..., E, N] counts of r in N equal bins over [min(bias) - 1, max(bias) + 1]; each row sums to m.
      bias_E: [..., E] the bias that routed these tokens.
      load_E: int32 [..., E] tokens that chose each expert.

    Returns:
      the new bias [..., E] of mean 0; `bias_E` itself if no real token was counted.
    """
    whole, part = _mean(load_E)
    needed = whole + (part > 0)  # ceil(q)
    counts_EN = jnp.cumsum(histogram_EN, axis=-1)
    bin_E = jnp.argmax(counts_EN >= needed[..., None], axis=-1)[..., None]
    inside_E = jnp.take_along_axis(histogram_EN, bin_E, axis=-1)[..., 0]
    before_E = jnp.take_along_axis(counts_EN, bin_E, axis=-1)[..., 0] - inside_E
    share_E = jnp.clip(((whole - before_E) + part) / jnp.maximum(inside_E, 1), 0.0, 1.0)
    width = (jnp.max(bias_E, axis=-1, keepdims=True) - jnp.min(bias_E, axis=-1, keepdims=True) + 2.0) / histogram_EN.shape[-1]
    raised_E = (bin_E[..., 0] + share_E) * width
    return jnp.where(needed > 0, raised_E - jnp.mean(raised_E, axis=-1, keepdims=True), bias_E).astype(bias_E.dtype)


def exact(scores_SE: jax.Array, bias_E: jax.Array, k: int, mask_S: jax.Array | None = None) -> jax.Array:
    """The same from all scores: the (floor(q) + 1)-th smallest r of each expert, centred (report 2.3.3). For tests and small models.

    Args:
      scores_SE: [S, E] router scores, without the bias.
      bias_E: [E] the bias that routes them.
      k: active experts per token, fewer than E.
      mask_S: bool [S], the real tokens; None: all.
    """
    tokens, experts = scores_SE.shape
    real_S = jnp.ones(tokens, bool) if mask_S is None else mask_S
    cutoff_S = jax.lax.top_k(scores_SE + bias_E, k + 1)[0][:, -1]
    required_SE = jnp.sort(jnp.where(real_S[:, None], cutoff_S[:, None] - scores_SE, jnp.inf), axis=0)
    real = jnp.sum(real_S)
    raised_E = jnp.take(required_SE, real * k // experts, axis=0)
    return jnp.where(real > 0, raised_E - jnp.mean(raised_E), bias_E)


def sign_step(load_E: jax.Array, rate: float) -> jax.Array:
    """rate * sign(mean load - load), int32 [..., E] -> float32 (the auxiliary-loss-free rule of DeepSeek-V3 and K2).

    It is not centred: a common offset changes no choice, and the published rule has none.
    """
    whole, part = _mean(load_E)
    return rate * jnp.sign((whole - load_E) + part)


def balance(balancing: Balancing, *, sign_rate: float, quantile_momentum: float = 0.0) -> optax.GradientTransformationExtraArgs:
    """The update of router biases, to be added to the bias as it is; gradients are ignored.

    Its `update` takes `histograms` and `loads`, dicts from a bias's path to int32 [..., E, N] and [..., E] of the whole optimizer step.
    `quantile` replaces the bias by `solve`, save for the share `quantile_momentum`, which makes it a moving average of the solutions (the
    refinement that report App. D mentions); `sign` moves it by `sign_step`; `none` leaves it, as does an absent path.
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        grads: Any,
        state: optax.EmptyState,
        params: Any = None,
        *,
        histograms: Mapping[Path, jax.Array],
        loads: Mapping[Path, jax.Array],
        **_: Any,
    ) -> tuple[Any, optax.EmptyState]:
        known = by_path(params)
        require("router histograms", histograms, known)
        require("expert loads", loads, known)

        def step(path: Path, grad: jax.Array, bias_E: jax.Array) -> jax.Array:
            if balancing == "quantile" and path in histograms:
                return (1.0 - quantile_momentum) * (solve(histograms[path], bias_E, loads[path]) - bias_E)
            if balancing == "sign" and path in loads:
                return sign_step(loads[path], sign_rate).astype(bias_E.dtype)
            return jnp.zeros_like(grad)

        return map_by_path(step, grads, params), state

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]  # the type of `update` there has no extra arguments


def _mean(load_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean over experts as a whole number and a float32 rest in [0, 1), each [..., 1]: exact however many tokens there are."""
    total, experts = jnp.sum(load_E, axis=-1, keepdims=True), load_E.shape[-1]
    return total // experts, (total % experts).astype(jnp.float32) / experts
