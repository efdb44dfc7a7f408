"""Rotary positions and the mixer that uses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, MLAConfig, ModelConfig
from k3train.models.layout import LocalLayout
from k3train.models.mla import GatedMLA, RotaryMLA
from k3train.models.parameters import graph_and_params
from k3train.models.rotary import document_positions, rotate
from tests.x64 import float64

THETA = 50.0
CONFIG = ModelConfig(
    d_model=16,
    mla=MLAConfig(num_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_head_dim=6, rope_head_dim=4, v_head_dim=6, rope_theta=THETA),
    dtypes=DtypePolicy(parameters="float64", compute="float64"),
)


def test_positions_start_again_in_every_document():
    segment_ids = jnp.array([[0, 0, 0, 1, 1, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    np.testing.assert_array_equal(document_positions(segment_ids), expected)


@pytest.mark.numerics
def test_rotation_is_a_product_of_complex_numbers():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 6)), rng.integers(0, 1000, size=(2, 5))
    points = x[..., 0::2] + 1j * x[..., 1::2]
    turned = points * np.exp(1j * positions[..., None, None] * THETA ** (-np.arange(3) * 2 / 6))
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    with float64():
        np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.asarray(positions)[..., None], THETA), expected, atol=1e-12)
    assert rotate(jnp.ones((1, 4), jnp.bfloat16), jnp.array([7]), THETA).dtype == jnp.bfloat16


def params_of(module: nnx.Module, rng: np.random.Generator):
    graphdef, shapes = graph_and_params(module)
    return graphdef, jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), shapes)


def reference(params, x_TD: np.ndarray) -> np.ndarray:
    """K2's attention on one document, head by head, after the published code: even and odd channels parted, then halves rotated."""
    p, T, (N, P) = {name: np.asarray(leaf) for name, leaf in params.items()}, len(x_TD), (6, 4)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def rope(x_TP):
        parted = np.concatenate([x_TP[:, 0::2], x_TP[:, 1::2]], axis=1)
        angles = np.arange(T)[:, None] * np.tile(THETA ** (-np.arange(0, P, 2) / P), 2)
        halves = np.concatenate([-parted[:, P // 2 :], parted[:, : P // 2]], axis=1)
        return parted * np.cos(angles) + halves * np.sin(angles)

    kv = x_TD @ p["kv_down"]
    latent, shared = norm(kv[:, :8], p["kv_norm"]), rope(kv[:, 8:])
    q_latent, y = norm(x_TD @ p["q_down"], p["q_norm"]), np.zeros_like(x_TD)
    for head in range(2):
        q = q_latent @ p["q_up"][:, head]
        logits = (q[:, :N] @ (latent @ p["k_up"][:, head]).T + rope(q[:, N:]) @ shared.T) / np.sqrt(N + P)
        weights = np.where(np.tri(T) > 0, np.exp(logits), 0.0)
        y += weights / weights.sum(1, keepdims=True) @ (latent @ p["v_up"][:, head]) @ p["out_proj"][head]
    return y


@pytest.mark.numerics
def test_rotary_mla_in_packed_documents():
    with float64():
        rng = np.random.default_rng(1)
        graphdef, params = params_of(RotaryMLA(CONFIG), rng)
        assert "gate_proj" not in params
        x, lengths = rng.normal(size=(1, 12, 16)), (5, 4)
        segment_ids = jnp.array([[0] * 5 + [1] * 4 + [-1] * 3])
        y, report = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x, segment_ids, LocalLayout(), collect=True))(params, x)
        start = 0
        for length in lengths:
            np.testing.assert_allclose(y[0, start : start + length], reference(params, x[0, start : start + length]), atol=1e-10)
            start += length
        assert report["max_logit"].shape == (2,) and set(report) == {"max_logit"}


@pytest.mark.numerics
def test_without_rotation_and_gate_both_kinds_are_one():
    """A gate of weight zero halves every channel."""
    with float64():
        rng = np.random.default_rng(2)
        gated, params = params_of(GatedMLA(CONFIG), rng)
        params["gate_proj"] = jnp.zeros_like(params["gate_proj"])
        x, segment_ids = jnp.asarray(rng.normal(size=(1, 6, 16))), jnp.zeros((1, 6), jnp.int32)
        y, _ = nnx.merge(gated, params)(x, segment_ids, LocalLayout())
        del params["gate_proj"]
        rotary, _ = graph_and_params(RotaryMLA(CONFIG))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("k3train.models.mla.rotate", lambda channels, positions, theta: channels)
            y_rotary, _ = nnx.merge(rotary, params)(x, segment_ids, LocalLayout())
        np.testing.assert_allclose(y_rotary, 2 * y, atol=1e-12)
