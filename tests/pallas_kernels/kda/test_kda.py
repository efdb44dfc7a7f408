"""The `kda` function: what it accepts, which form it picks, finite gradients, and memory linear in tokens."""

from __future__ import annotations

import logging
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.kda as kda_package
from pallas_kernels.kda import kda
from pallas_kernels.kda.chunked import default_chunk_size, kda_chunked
from tests.pallas_kernels.kda.cases import LOWER_BOUND, Inputs, with_gradients
from tests.quick import QUICK_COMPILE


def arrays(batch: int = 1, tokens: int = 20, heads: int = 2, key_width: int = 4, value_width: int = 6, dtype: str = "float32") -> Inputs:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    keys = (batch, tokens, heads, key_width)
    v, beta = normal(batch, tokens, heads, value_width), normal(batch, tokens, heads)
    state = normal(batch, heads, key_width, value_width)
    return Inputs(normal(*keys), normal(*keys), v, normal(*keys), beta, normal(heads), normal(heads, key_width), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((1, 20, 8))}, "q must have 4 dims"),
        ({"v": jnp.ones((1, 20, 12))}, "v must have 4 dims"),
        ({"q": jnp.ones((1, 0, 2, 4))}, "must not be empty"),
        ({"k": jnp.ones((1, 20, 2, 5))}, "k has shape"),
        ({"v": jnp.ones((1, 19, 2, 6))}, "v has shape"),
        ({"gate": jnp.ones((1, 20, 2))}, "gate has shape"),
        ({"beta": jnp.ones((1, 20, 1))}, "beta has shape"),
        ({"a_log": jnp.ones((4,))}, "a_log has shape"),
        ({"dt_bias": jnp.ones((8,))}, "dt_bias has shape"),
        ({"initial_state": jnp.ones((1, 2, 6, 4))}, "initial_state has shape"),
        ({"k": jnp.ones((1, 20, 2, 4), jnp.int32)}, "k must be floating point"),
        ({"segment_ids": jnp.ones((20,), jnp.int32)}, "segment_ids has shape"),
        ({"segment_ids": jnp.ones((1, 20))}, "segment_ids must be signed integers"),
        ({"lower_bound": 0.0}, "lower_bound must lie in"),
        ({"lower_bound": -5.5}, "lower_bound must lie in"),
        ({"implementation": "fastest"}, "implementation must be"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    given = arrays()._asdict() | {"segment_ids": None, "lower_bound": LOWER_BOUND, "implementation": None} | change
    with pytest.raises(ValueError, match=message):
        kda(
            *(given[name] for name in Inputs._fields[:7]),
            lower_bound=given["lower_bound"],
            segment_ids_BT=given["segment_ids"],
            initial_state_BHKV=given["initial_state"],
            implementation=given["implementation"],
        )


@pytest.mark.parametrize("size", [0, 8, 24, 48])
def test_chunk_size_must_be_doubled_tiles(size: int) -> None:
    with pytest.raises(ValueError, match="chunk_size must be 16 times a power of two"):
        kda_chunked(*arrays()[:7], lower_bound=LOWER_BOUND, chunk_size=size)


def test_default_chunk_sizes() -> None:
    assert [default_chunk_size(tokens, "gpu") for tokens in (1, 16, 17, 40, 64, 8192)] == [16, 16, 32, 64, 64, 64]
    assert default_chunk_size(8192, "cpu") == 16


def test_forms_agree_and_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs = arrays()

    def run(implementation: str | None) -> tuple[jax.Array, jax.Array]:
        form = partial(kda, lower_bound=LOWER_BOUND, implementation=implementation)
        return jax.jit(form, compiler_options=QUICK_COMPILE)(*inputs[:7])

    kda_package._choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels.kda"):
        picked = run(None)
        run(None)
    assert len(caplog.records) == 1
    for implementation in ("recurrent", "chunked"):
        for a, b in zip(run(implementation), picked, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "form", [pytest.param("recurrent", marks=pytest.mark.slow), "chunked", pytest.param("chunked64", marks=pytest.mark.slow)]
)
def test_gradients_are_finite(form: str) -> None:
    """Zero keys, queries and values, gates far outside, and a row of nothing but padding."""
    inputs = arrays(batch=3, tokens=70)
    gate = inputs.gate.at[:, :, 0].set(1e4).at[:, :, 1].set(-1e4).at[:, 30:40].set(0)
    zero = {name: getattr(inputs, name).at[:, 10:20].set(0) for name in ("q", "k", "v")}
    inputs = inputs._replace(**zero, gate=gate, beta=inputs.beta.at[:, ::3].set(1e4).at[:, 1::3].set(-1e4))
    ids = jnp.asarray([[0] * 70, [-1] * 70, [0] * 30 + [-1] * 30 + [1] * 10], jnp.int32)
    results = with_gradients(form)(inputs, jnp.ones_like(inputs.v), jnp.ones_like(inputs.initial_state), ids)
    for name, x in zip(("o", "final_state", *Inputs._fields), (*results[:2], *results.gradients), strict=True):
        assert np.isfinite(np.asarray(x)).all(), name
    np.testing.assert_array_equal(results.final_state[1], inputs.initial_state[1])


def test_backward_keeps_inputs_and_one_state_per_chunk() -> None:
    inputs = arrays(tokens=64, key_width=16, value_width=16)
    kept = jax.eval_shape(lambda *x: jax.vjp(lambda *x: kda_chunked(*x, lower_bound=LOWER_BOUND), *x)[1], *inputs[:7])
    states = (64 // 16) * 2 * 16 * 16
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(kept)) <= sum(x.size for x in inputs[:7]) + states


@pytest.mark.slow
def test_memory_is_linear_in_tokens() -> None:
    """By the compiler's own count, for the whole gradient: doubling T doubles it, and no T x T array would fit in it."""

    def temporary_bytes(tokens: int) -> int:
        shapes = jax.eval_shape(lambda: arrays(tokens=tokens, heads=1, key_width=16, value_width=16))

        def loss(inputs: Inputs, ids: jax.Array) -> jax.Array:
            return jnp.sum(kda_chunked(*inputs[:7], lower_bound=LOWER_BOUND, segment_ids_BT=ids)[0])

        compiled = jax.jit(jax.grad(loss)).lower(shapes, jax.ShapeDtypeStruct((1, tokens), jnp.int32)).compile(QUICK_COMPILE)
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(8192), temporary_bytes(16384)
    assert long < 2.2 * short
    assert long < 0.2 * 4 * 16384**2
    assert long < 60 * 4 * 16384 * 16
