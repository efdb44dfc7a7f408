"""Decoding over a cache equals the model over all tokens at once, for every mixer and depth form, from prompts of different length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.inference import cache as caches
from k3train.inference.forward import Forward
from k3train.models.kda import KimiDeltaAttention
from k3train.models.layout import LocalLayout
from k3train.models.mla import GatedMLA, RotaryMLA
from k3train.models.parameters import abstract, graph_and_params
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

LENGTHS, STEPS, WIDTH = np.array([1, 2, 5, 19]), 4, 19


@pytest.fixture(autouse=True)
def wide_arrays():
    with float64():
        yield


def config(**fields) -> ModelConfig:
    base = dict(
        vocab_size=11, d_model=12, num_layers=2, last_mixer=None, dense_dim=12, attn_res_block_size=1,
        kda=KDAConfig(num_heads=2, head_dim=6),
        mla=MLAConfig(num_heads=2, q_lora_rank=6, kv_lora_rank=5, nope_head_dim=6, rope_head_dim=4, v_head_dim=3, rope_theta=30.0),
        moe=MoEConfig(num_experts=4, experts_per_token=2, latent_dim=6, expert_dim=6, num_shared_experts=1),
        dtypes=DtypePolicy(parameters="float64", compute="float64"), remat="none",
    )  # fmt: skip
    return ModelConfig(**{**base, **fields})


def noise(shapes, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.6 * rng.normal(size=leaf.shape)), shapes)


def jit(function):
    return jax.jit(function, compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("kind", [KimiDeltaAttention, GatedMLA, RotaryMLA])
def test_mixer(kind):
    model = config(mixer_pattern=("kda",) if kind is KimiDeltaAttention else ("gated_mla",))
    graphdef, shapes = graph_and_params(kind(model))
    params, size = noise(shapes), WIDTH + STEPS
    x = np.random.default_rng(1).normal(size=(len(LENGTHS), size, model.d_model))  # row b: its prompt, then the tokens of the steps
    ends = np.arange(size) < (LENGTHS + STEPS)[:, None]

    @jit
    def at_once(params, x):
        return nnx.merge(graphdef, params)(x, jnp.where(ends, 0, -1), LocalLayout())[0]

    @jit
    def over_cache(params, x, lengths):
        mixer, real = nnx.merge(graphdef, params), jnp.arange(size) < lengths[:, None]
        return caches.advance(mixer, x, real, caches.empty(model, len(x), size).layers[0], jnp.zeros_like(lengths))

    @jit
    def step(params, x, goes_on, cache, lengths):
        return caches.advance(nnx.merge(graphdef, params), x, goes_on[:, None], cache, lengths)

    expected = at_once(params, x)
    y, cache = over_cache(params, x, LENGTHS)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(y[row, :length], expected[row, :length], atol=1e-11)
    for done in range(STEPS):
        at = LENGTHS + done
        y, cache = step(params, x[np.arange(len(x)), at][:, None], np.ones(len(x), bool), cache, at)
        np.testing.assert_allclose(y[:, 0], expected[np.arange(len(x)), at], atol=1e-11)
    _, longer = over_cache(params, x, LENGTHS + STEPS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), cache, longer)

    _, resting = step(params, x[:, :1], np.array([False, True, False, True]), cache, LENGTHS + STEPS - 1)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), resting, cache)
    assert any(np.any(a[1] != b[1]) for a, b in zip(jax.tree.leaves(resting), jax.tree.leaves(cache), strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        dict(depth="full_attention_residuals", mixer_pattern=("kda", "gated_mla"), num_dense_layers=2),
        dict(depth="residual", mixer_pattern=("mla_rope",), num_layers=3, num_dense_layers=1, width="moe", activation="swiglu"),
    ],
    ids=["full", "k2_like"],
)
def test_decoder(fields):
    """Block Attention Residuals: test_golden_decoding.py."""
    model = config(**fields)
    graphdef, shapes, _ = abstract(model)
    params, forward, size = noise(shapes), Forward(model), WIDTH + STEPS
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, size=(len(LENGTHS), size))
    rows = np.arange(len(LENGTHS))

    @jit
    def at_once(params, tokens):
        return nnx.merge(graphdef, params)(tokens, jnp.zeros_like(tokens), layout=LocalLayout()).logits_BTV

    @jit
    def over_cache(params, tokens, next_NB):
        def step(cache, token_B):
            logits_BV, cache = forward.step(params, token_B, jnp.ones(len(token_B), bool), cache)
            return cache, logits_BV

        first_BV, cache = forward.prefill(params, tokens, LENGTHS, size)
        return first_BV, jax.lax.scan(step, cache, next_NB)[1]

    expected = np.asarray(at_once(params, tokens))
    first, following = over_cache(params, tokens[:, :WIDTH], np.stack([tokens[rows, LENGTHS + done] for done in range(STEPS)]))
    np.testing.assert_allclose(first, expected[rows, LENGTHS - 1], atol=1e-10)
    for done in range(STEPS):
        np.testing.assert_allclose(following[done], expected[rows, LENGTHS + done], atol=1e-10)
