"""Experts on the full width, SwiGLU, and the router's choices and reports.

Shapes: B rows, T tokens, D model, E experts, k active experts, F hidden.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.config import DtypePolicy, ModelConfig, MoEConfig
from k3train.models.feed_forward import swiglu
from k3train.models.layout import LocalLayout
from k3train.models.moe import MoE
from k3train.models.parameters import graph_and_params
from k3train.models.router import choose_experts, in_turn, route
from pallas_kernels.moe_dispatch import SituGLU
from tests.quick import QUICK_COMPILE
from tests.x64 import float64

pytestmark = pytest.mark.numerics

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
B, T, D, E, k, F = 2, 6, 8, 5, 2, 4
MOE = MoEConfig(num_experts=E, experts_per_token=k, expert_dim=F, num_shared_experts=1, routed_scaling=2.5, histogram_bins=20)
CONFIG = ModelConfig(
    d_model=D, width="moe", activation="swiglu", moe=MOE, dtypes=DtypePolicy(parameters="float64", compute="float64")
)  # fmt: skip
SEGMENTS = np.where(np.arange(T) < [[T], [4]], 0, -1).astype(np.int32)  # the second row ends in padding


def glu(x, w):
    gate = x @ w["gate_proj"]
    return gate / (1 + jnp.exp(-gate)) * (x @ w["up_proj"]) @ w["down_proj"]


def reference(params, x_BTD):
    """Every expert on every token, weighted by zero where it was not chosen."""
    scores = 1 / (1 + jnp.exp(-(x_BTD @ params["router"])))
    ranks = jnp.argsort(jnp.argsort(-(scores + params["router_bias"])))
    chosen = scores * (ranks < k)
    weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
    experts = [{f"{name}_proj": params[f"w_{name}"][e] for name in ("gate", "up", "down")} for e in range(E)]
    routed = sum(weights[..., e, None] * glu(x_BTD, experts[e]) for e in range(E))
    return 2.5 * routed + glu(x_BTD, params["shared"])


def test_values_and_gradients_are_those_of_plain_code():
    rng = np.random.default_rng(0)
    graphdef, shapes = graph_and_params(MoE(CONFIG))
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    x_BTD, dy_BTD = rng.normal(size=(2, B, T, D))

    def ours(params, x_BTD):
        return nnx.merge(graphdef, params)(x_BTD, SEGMENTS, LocalLayout())[0]

    with float64():
        y, expected = (jit(f)(params, x_BTD) for f in (ours, reference))
        grads, wanted = (jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * dy_BTD), (0, 1)))(params, x_BTD) for f in (ours, reference))
    np.testing.assert_allclose(y, expected, rtol=1e-10)
    for (path, value), expected in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))
    assert not np.any(grads[0]["router_bias"])


def test_swiglu():
    gate, up = np.float32([-3.0, 0.0, 0.5, 8.0]), np.float32([2.0, 1.0, -4.0, 0.25])
    np.testing.assert_allclose(swiglu(gate, up), gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
    small = gate / 100
    np.testing.assert_allclose(swiglu(small, up), SituGLU(beta=4.0, linear_beta=25.0)(small, up), rtol=0.02)
    assert swiglu(jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16


def run_router(moe: MoEConfig, collect: bool):
    """The router as a function of x, its matrix and its bias, and values for these."""
    rng = np.random.default_rng(1)
    x_BTD, router_DE, bias_E = (rng.normal(size=s).astype(np.float32) for s in ((B, T, D), (D, E), (E,)))
    x_BTD[SEGMENTS < 0] = np.nan  # padding must not reach any count
    return lambda *a: choose_experts(*a, moe, SEGMENTS, LocalLayout(), collect), (x_BTD, router_DE, bias_E)


def test_report_counts_real_tokens():
    run, (x_BTD, router_DE, bias) = run_router(MOE, True)
    routing, report = jit(run)(x_BTD, router_DE, bias)
    real = SEGMENTS >= 0
    scores = 1 / (1 + np.exp(-(x_BTD[real].astype(np.float64) @ router_DE)))
    loads = [np.bincount(np.asarray(routing.expert_ids_BTk)[b][real[b]].reshape(-1), minlength=E) for b in range(B)]
    np.testing.assert_array_equal(report["expert_load"], loads)
    share = scores / scores.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.sum(report["router_entropy"]), -np.sum(share * np.log(share)), rtol=1e-5)
    np.testing.assert_allclose(report["bias_spread"], np.ptp(bias), rtol=1e-6)

    required = np.sort(scores + bias, axis=-1)[:, -k - 1, None] - scores
    edges = np.linspace(bias.min() - 1, bias.max() + 1, 21)
    expected = [np.histogram(required[:, e], edges)[0] for e in range(E)]
    assert report["histogram"].dtype == jnp.int32
    np.testing.assert_array_equal(report["histogram"], [expected])


@pytest.mark.parametrize(
    ("changes", "reported"),
    [({}, True), ({"balancing": "sign"}, False), ({"balancing": "none"}, False), ({"experts_per_token": E}, False)],
)
def test_a_histogram_only_where_quantiles_balance(changes, reported):
    """Where every expert is chosen there is no cutoff, and all loads are equal anyway."""

    def shapes(moe, collect):
        run, arguments = run_router(moe, collect)
        return jax.eval_shape(run, *arguments)

    moe = dataclasses.replace(MOE, **changes)
    routing, report = shapes(moe, True)
    assert ("histogram" in report) == reported
    assert (routing.cutoff_BT is None) == (moe.experts_per_token == E)
    assert routing.expert_ids_BTk.shape == (B, T, moe.experts_per_token)
    assert set(shapes(moe, False)[1]) == {"expert_load", "expert_ids"}


def test_every_expert_chosen():
    scores = np.random.default_rng(2).random((1, 3, E))
    routing = route(jnp.asarray(scores, jnp.float32), jnp.zeros(E), dataclasses.replace(MOE, experts_per_token=E), LocalLayout())
    np.testing.assert_array_equal(np.sort(routing.expert_ids_BTk), np.tile(np.arange(E), (1, 3, 1)))
    np.testing.assert_allclose(np.sum(routing.weights_BTk, axis=-1), 2.5, rtol=1e-6)


def test_force_balanced_takes_experts_in_turn():
    moe = dataclasses.replace(MOE, force_balanced=True)
    expected = np.arange(B * T * k).reshape(B, T, k) % E
    np.testing.assert_array_equal(in_turn((B, T), moe), expected)
    scores = jnp.asarray(np.random.default_rng(3).random((B, T, E)), jnp.float32)
    routing = route(scores, jnp.zeros(E), moe, LocalLayout())
    np.testing.assert_array_equal(routing.expert_ids_BTk, expected)
    chosen = np.take_along_axis(np.asarray(scores), expected, axis=-1)
    np.testing.assert_allclose(routing.weights_BTk, 2.5 * chosen / chosen.sum(axis=-1, keepdims=True), rtol=1e-6)
    assert np.ptp(np.bincount(expected.reshape(-1))) <= 1
