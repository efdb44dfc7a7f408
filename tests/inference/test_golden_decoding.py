"""Greedy decoding of the tiny model, prompts of many lengths in one batch, against the published modelling code's arrays.

Each step is given the token that the reference chose, which is what greedy decoding does if the arg-max is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import DtypePolicy
from k3train.inference.cache import empty
from k3train.inference.forward import Forward
from k3train.interop import hugging_face
from k3train.models import stacks
from tests.golden import EXACT, FOLDER, check, load
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

GOLDEN = load("model_tiny/greedy")
PROMPTS, LENGTHS, NEW = np.maximum(GOLDEN["prompts"], 0), GOLDEN["prompt_lengths"], GOLDEN["new_tokens"]
(ROWS, LONGEST), COUNT = PROMPTS.shape, NEW.shape[1]


def load_model(dtype: str) -> tuple[Forward, Any]:
    folder = FOLDER / "model_tiny"
    config = dataclasses.replace(hugging_face.read_config(folder), dtypes=DtypePolicy(parameters=dtype, compute=dtype))
    return Forward(config), stacks.stack(hugging_face.read_checkpoint(folder, config), config)


def compiled(function: Callable, *arguments: Any) -> Any:
    return jax.jit(function, compiler_options=QUICK_COMPILE)(*arguments)


def test_prompts_at_once_in_float64():
    with float64():
        forward, params = load_model("float64")

        def decode(params, prompts, lengths, tokens_NB):
            def step(cache, token_B):
                logits_BV, cache = forward.step(params, token_B, jnp.ones(ROWS, bool), cache)
                return cache, logits_BV

            first_BV, cache = forward.prefill(params, prompts, lengths, LONGEST + COUNT)
            cache, logits_NBV = jax.lax.scan(step, cache, tokens_NB)
            return jnp.concatenate([first_BV[None], logits_NBV]).swapaxes(0, 1), cache.lengths_B

        logits_BNV, kept = compiled(decode, params, PROMPTS, LENGTHS, NEW.T[:-1])
        np.testing.assert_array_equal(kept, LENGTHS + COUNT - 1)
        np.testing.assert_array_equal(np.argmax(logits_BNV, axis=-1), NEW)
        check(logits_BNV, GOLDEN["step_logits_f64"], EXACT, "step logits")


def test_every_token_by_itself_in_float32():
    """Short prompts wait until they are through, and rest when they have all their tokens."""
    forward, params = load_model("float32")
    places = np.arange(LONGEST + COUNT - 1)
    tokens_BX = np.pad(PROMPTS, ((0, 0), (0, COUNT - 1)))
    for row, length in enumerate(LENGTHS):
        tokens_BX[row, length : length + COUNT - 1] = NEW[row, :-1]
    goes_on_BX = places < (LENGTHS + COUNT - 1)[:, None]

    def decode(params, tokens_XB, goes_on_XB):
        def step(cache, given):
            logits_BV, cache = forward.step(params, *given, cache)
            return cache, logits_BV

        return jax.lax.scan(step, empty(forward.config, ROWS, len(places)), (tokens_XB, goes_on_XB))[1].swapaxes(0, 1)

    logits_BXV = np.asarray(compiled(decode, params, tokens_BX.T, goes_on_BX.T))
    logits_BNV = np.stack([logits_BXV[row, length - 1 : length - 1 + COUNT] for row, length in enumerate(LENGTHS)])
    np.testing.assert_array_equal(np.argmax(logits_BNV, axis=-1), NEW)
    np.testing.assert_allclose(logits_BNV, GOLDEN["step_logits"], rtol=0, atol=5e-3)
