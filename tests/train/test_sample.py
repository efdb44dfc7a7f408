"""The look at a finished run's model: what is asked of generation, and how its tokens are read."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import EvaluationConfig, ModelConfig
from k3train.data.tokenizer import ByteTokenizer
from k3train.train import sample

ASKED = EvaluationConfig(sample_prompt="def ", sample_tokens=7)


def test_the_continuation_follows_the_prompt_and_ends_with_the_document(monkeypatch: pytest.MonkeyPatch, tiny_model: ModelConfig):
    asked = {}

    def stream(config, params, prompts, **options):
        asked.update(options, prompt=prompts[0].tolist())
        yield np.array([[ord("f"), ord("("), 0xC3]])
        yield np.array([[0xA9, -1, -1]])

    monkeypatch.setattr(sample, "stream", stream)
    assert sample.sample(ASKED, tiny_model, {"w": jnp.zeros(2)}, ByteTokenizer()) == "def f(\u00e9"
    assert asked["prompt"] == [256, *b"def "] and asked["max_new_tokens"] == 7 and asked["stop_id"] == 256 and asked["num_tokens"] == 257


def test_there_is_none_without_a_prompt_or_over_several_devices(tiny_model: ModelConfig):
    unasked = dataclasses.replace(ASKED, sample_prompt=None)
    assert sample.sample(unasked, tiny_model, {"w": jnp.zeros(2)}, ByteTokenizer()) is None
    spread = {"w": SimpleNamespace(devices=lambda: {0, 1})}
    assert sample.sample(ASKED, tiny_model, spread, ByteTokenizer()) is None
