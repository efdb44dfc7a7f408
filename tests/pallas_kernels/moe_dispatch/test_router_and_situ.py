"""The router's product in three terms, and SiTU-GLU in its cheap form, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_dispatch import SituGLU, router, router_logits
from pallas_kernels.moe_dispatch.router import split_product
from pallas_kernels.target import Target
from tests.golden import check, load
from tests.x64 import float64

pytestmark = pytest.mark.numerics


def relative_error(actual, expected) -> float:
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


def value_and_gradients(function, cotangent, *primals):
    y, pullback = jax.vjp(function, *primals)
    return y, *pullback(cotangent)


def wide(*arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def test_router_product_is_as_exact_as_float32():
    rng = np.random.default_rng(0)
    x_SD = jnp.asarray(rng.normal(size=(64, 512)), jnp.bfloat16)
    w_DE, d_SE = (jnp.asarray(rng.normal(size=shape) * scale, jnp.float32) for shape, scale in (((512, 32), 0.04), ((64, 32), 1e-4)))
    y_SE, dx_SD, dw_DE = jax.jit(functools.partial(value_and_gradients, split_product))(d_SE, x_SD, w_DE)
    x, w, d = wide(x_SD, w_DE, d_SE)
    assert (y_SE.dtype, dx_SD.dtype, dw_DE.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert relative_error(y_SE, x @ w) < 3e-7 and relative_error(dw_DE, x.T @ d) < 3e-7
    assert relative_error(dx_SD, d @ w.T) < 2e-3  # rounded to bfloat16


def test_router_logits_take_leading_axes_and_choose_by_platform(monkeypatch):
    rng = np.random.default_rng(0)
    x_BTD, w_DE = jnp.asarray(rng.normal(size=(2, 8, 32)), jnp.bfloat16), jnp.asarray(rng.normal(size=(32, 5)), jnp.float32)
    plain = jax.jit(router_logits)(x_BTD, w_DE)
    monkeypatch.setattr(router, "target", lambda: Target("gpu", 1))
    split = jax.jit(lambda *arguments: router_logits(*arguments))(x_BTD, w_DE)
    assert "bf16" in str(jax.make_jaxpr(lambda *arguments: router_logits(*arguments))(x_BTD, w_DE))
    for logits in (plain, split):
        assert logits.shape == (2, 8, 5) and relative_error(logits, np.matmul(*wide(x_BTD, w_DE))) < 1e-6
    with float64():
        assert router_logits(jnp.asarray(np.asarray(x_BTD, np.float64)), w_DE).dtype == jnp.float64


@pytest.mark.parametrize("beta", [4.0, 3.0])
def test_situ_in_bfloat16_and_its_gradients(beta):
    rng, situ = np.random.default_rng(0), SituGLU(beta=beta, linear_beta=25.0)
    extremes = [0, -0.0, 1e-3, -1e-3, 88, -88, 200, -200, 1e4, -1e4, 1e30, -1e30]
    gate, up = (np.concatenate([3 * rng.normal(size=4000), order]) for order in (extremes, rng.permutation(extremes)))
    gate, up, d = (jnp.asarray(array, jnp.bfloat16) for array in (gate, up, rng.normal(size=gate.shape)))
    actual = jax.jit(functools.partial(value_and_gradients, situ))(d, gate, up)
    g, u, cotangent = wide(gate, up, d)
    with np.errstate(over="ignore"):
        sigmoid, tanh, linear = 1 / (1 + np.exp(-g)), np.tanh(g / beta), np.tanh(u / 25)
    expected = (
        beta * tanh * sigmoid * 25 * linear,
        cotangent * 25 * linear * ((1 - tanh**2) * sigmoid + beta * tanh * sigmoid * (1 - sigmoid)),
        cotangent * beta * tanh * sigmoid * (1 - linear**2),
    )
    for value, wanted in zip(actual, expected, strict=True):
        assert value.dtype == jnp.bfloat16 and np.isfinite(np.asarray(value, np.float64)).all()
        assert relative_error(value, wanted) < 2e-3


def test_factors_and_slopes_are_right_to_a_millionth_of_their_bounds():
    situ = SituGLU(beta=4.0, linear_beta=25.0)
    gate, up = jnp.linspace(-60, 60, 4001, dtype=jnp.float32), jnp.linspace(-200, 200, 4001, dtype=jnp.float32)
    g, u = wide(gate, up)
    sigmoid, tanh, linear = 1 / (1 + np.exp(-g)), np.tanh(g / 4), np.tanh(u / 25)
    expected = 4 * tanh * sigmoid, 25 * linear, (1 - tanh**2) * sigmoid + 4 * tanh * sigmoid * (1 - sigmoid), 1 - linear**2
    for value, wanted in zip(situ.factors_and_slopes(gate, up), expected, strict=True):
        assert np.abs(np.asarray(value, np.float64) - wanted).max() < 1e-6 * np.abs(wanted).max()
    product = np.asarray(situ.product(gate, up), np.float64)
    assert np.abs(product - expected[0] * expected[1]).max() < 1e-4


def test_golden_situ():
    a = load("situ_glu")
    situ = SituGLU(beta=4.0, linear_beta=25.0)
    values = jax.jit(functools.partial(value_and_gradients, situ))(*(jnp.asarray(a[name]) for name in ("dy", "gate", "up")))
    for name, value in zip(("y", "d_gate", "d_up"), values, strict=True):
        check(value, a[name], 2e-6, name)
