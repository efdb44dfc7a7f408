"""Continuations of prompts, piece by piece.  Legend: B batch, T tokens of the longest prompt, N tokens of a piece, V vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from k3train.config import ModelConfig
from k3train.inference.cache import Cache
from k3train.inference.forward import Forward
from k3train.inference.sampling import Sampling, sample
from k3train.models.parameters import Tree

NOTHING = -1
"""Stands in a piece where a row has stopped."""
PIECE = 32
CACHE_STEP = 128  # the cache's length is a multiple, so that prompts of many lengths share compiled programs


class NotFiniteError(ArithmeticError):
    """The model's logits hold NaN or infinity."""


class _State(NamedTuple):
    logits_BV: jax.Array
    cache: Cache
    goes_on_B: jax.Array
    drawn: jax.Array
    """int32: tokens drawn for each row so far."""
    finite: jax.Array


def stream(
    config: ModelConfig,
    params: Tree,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop_id: int | None = None,
    num_tokens: int | None = None,
) -> Iterator[np.ndarray]:
    """Continues every prompt by up to `max_new_tokens` tokens and yields them as they come: int32 [B, up to `PIECE`].

    A row ends before `stop_id`, from where on it holds `NOTHING`; all ends when every row has. What a row draws depends on the seed, its
    number and its own prompt alone. `num_tokens` keeps to the first ids, for a vocabulary larger than the tokenizer's.

    Raises:
      ValueError: a prompt is empty or holds an id outside the vocabulary.
      NotFiniteError: the logits are not finite.
    """
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    if not len(prompts) or lengths_B.min() < 1:
        raise ValueError("every prompt needs at least one token")
    width = max(16, 1 << int(lengths_B.max() - 1).bit_length())  # few shapes, few compilations
    tokens_BT = np.zeros((len(prompts), width), np.int32)
    for row_T, prompt in zip(tokens_BT, prompts, strict=True):
        row_T[: len(prompt)] = prompt
    if tokens_BT.min() < 0 or tokens_BT.max() >= config.vocab_size:
        raise ValueError(f"token ids run from {tokens_BT.min()} to {tokens_BT.max()}; the vocabulary is 0 to {config.vocab_size - 1}")
    max_length = max(width, -(-(int(lengths_B.max()) + max_new_tokens) // CACHE_STEP) * CACHE_STEP)

    prefill, decode = _programs(config, sampling)
    limits = jnp.int32([config.vocab_size if num_tokens is None else num_tokens, NOTHING if stop_id is None else stop_id])
    row_keys_B = jax.random.split(jax.random.key(seed), len(prompts))
    logits_BV, cache = prefill(params, tokens_BT, lengths_B, max_length=max_length)
    state = _State(logits_BV, cache, jnp.ones(len(prompts), bool), jnp.int32(0), jnp.bool_(True))
    for start in range(0, max_new_tokens, PIECE):
        wanted = min(PIECE, max_new_tokens - start)
        state, tokens_BN = decode(params, state, row_keys_B, wanted, limits)
        if not state.finite:
            raise NotFiniteError("the logits are not finite")
        yield np.asarray(tokens_BN)[:, :wanted]
        if not np.any(state.goes_on_B):
            return


@functools.lru_cache(maxsize=8)
def _programs(config: ModelConfig, sampling: Sampling) -> tuple[Wrapped, Wrapped]:
    """The compiled functions, kept so that a second stream finds them."""
    forward = Forward(config)
    return jax.jit(forward.prefill, static_argnames="max_length"), jax.jit(partial(_piece, forward, sampling), donate_argnums=1)


def _piece(
    forward: Forward, sampling: Sampling, params: Tree, state: _State, row_keys_B: jax.Array, wanted: jax.Array, limits: jax.Array
) -> tuple[_State, jax.Array]:
    """Draws `wanted` tokens for each row that goes on; int32 [B, PIECE], filled up with `NOTHING`.

    `limits` holds the number of ids that may be drawn, and the id that stops a row.
    """
    num_tokens, stop_id = limits

    def more(loop: tuple[_State, jax.Array, jax.Array]) -> jax.Array:
        state, _, number = loop
        return (number < wanted) & jnp.any(state.goes_on_B) & state.finite

    def draw(loop: tuple[_State, jax.Array, jax.Array]) -> tuple[_State, jax.Array, jax.Array]:
        state, tokens_BN, number = loop
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(row_keys_B, state.drawn)
        finite = jnp.all(jnp.isfinite(state.logits_BV) | ~state.goes_on_B[:, None])
        allowed_V = jnp.arange(state.logits_BV.shape[-1]) < num_tokens
        token_B = sample(jnp.where(allowed_V, state.logits_BV, -jnp.inf), keys_B, sampling)
        goes_on_B = state.goes_on_B & (token_B != stop_id)
        tokens_BN = tokens_BN.at[:, number].set(jnp.where(goes_on_B, token_B, NOTHING))
        logits_BV, cache = forward.step(params, token_B, goes_on_B, state.cache)
        return _State(logits_BV, cache, goes_on_B, state.drawn + 1, finite), tokens_BN, number + 1

    nothing_BN = jnp.full((len(row_keys_B), PIECE), NOTHING, jnp.int32)
    state, tokens_BN, _ = jax.lax.while_loop(more, draw, (state, nothing_BN, jnp.int32(0)))
    return state, tokens_BN
