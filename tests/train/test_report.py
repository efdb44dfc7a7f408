"""What a step tells of the inside: sizes by module, and the name of the place where numbers stop being finite."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import ModelConfig
from k3train.models import parameters, stacks
from k3train.train.report import build_report, rms_by_module, where_not_finite


@pytest.fixture(scope="module")
def deep(tiny_model: ModelConfig) -> ModelConfig:
    """Six layers, so that two stacks hold several; layer 0 is dense."""
    return dataclasses.replace(
        tiny_model, num_layers=6, mixer_pattern=("kda", "kda", "gated_mla"), attn_res_block_size=3, last_mixer="gated_mla"
    )


def test_rms_by_module_sees_every_layer_at_its_place(deep: ModelConfig):
    """Every leaf of layer l holds l + 1; what stands outside holds 10."""
    _, params, _ = parameters.abstract(deep)
    canonical = stacks.unstack(params, deep)
    filled = {
        name: jax.tree.map(lambda leaf: np.full(leaf.shape, 10.0, np.float32), subtree)
        for name, subtree in canonical.items()
        if name != "layers"
    }
    filled["layers"] = {
        layer: jax.tree.map(lambda leaf, n=int(layer): np.full(leaf.shape, n + 1.0, np.float32), subtree)
        for layer, subtree in canonical["layers"].items()
    }
    rms = jax.jit(lambda tree: rms_by_module(tree, deep))(stacks.stack(filled, deep))
    assert {name: value.shape for name, value in rms.items() if value.ndim == 0} == {
        name: () for name in ("embed", "head", "norm", "output_res")
    }
    for name in ("mixer", "ffn", "mixer_norm", "ffn_norm", "mixer_res", "ffn_res"):
        np.testing.assert_allclose(rms[name], np.arange(1.0, 7.0), rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(rms["head"], 10.0, rtol=1e-6)


def test_the_report_counts_dead_experts_and_clipped_heads(deep: ModelConfig):
    _, params, _ = parameters.abstract(deep)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
    aux = {"expert_load": jnp.array([[0, 4, 0, 4]]), "max_logit": jnp.array([[99.0, 101.0], [150.0, 120.0]])}
    metrics = build_report(deep, qk_clip=100.0)(aux, zeros, zeros)
    assert metrics["dead_experts"].tolist() == [2]
    assert metrics["expert_load_max_over_mean"].tolist() == [2.0]
    assert metrics["clipped_heads"].tolist() == [1, 2]
    assert metrics["max_logit"].tolist() == [101.0, 150.0]
    assert "clipped_heads" not in build_report(deep, qk_clip=None)(aux, zeros, zeros)


NAN = float("nan")


@pytest.mark.parametrize(
    "loss, finite, gradients, place",
    [
        (NAN, [True, False, False], {"mixer": [NAN] * 3}, "layer 1 (gated_mla, latent_moe), in the forward pass"),
        (NAN, [True, True, True], {"mixer": [NAN] * 3, "head": NAN}, "the head or the loss"),
        (1.0, [True, True, True], {"mixer": [NAN, NAN, 0.1], "ffn": [NAN, 0.1, 0.1], "embed": NAN, "head": 0.1}, "layer 1 (gated_mla"),
        (1.0, [True, True, True], {"mixer": [NAN, 0.1, 0.1], "ffn": [NAN, 0.1, 0.1], "head": 0.1}, "layer 0 (kda, dense), mixer"),
        (1.0, [True, True, True], {"mixer": [0.1] * 3, "embed": NAN}, "the embedding"),
        (1.0, [True, True, True], {"mixer": [NAN] * 3, "head": float("inf")}, "head, in the backward pass"),
    ],
)
def test_the_place_of_the_first_number_that_is_not_finite(tiny_model, loss, finite, gradients, place):
    metrics = {"loss": np.float32(loss), **{f"gradient_rms/{name}": np.array(value, np.float32) for name, value in gradients.items()}}
    assert place in where_not_finite(metrics, finite, dataclasses.replace(tiny_model, num_layers=3))
