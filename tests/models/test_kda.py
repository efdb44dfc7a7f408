"""What the KDA layer reports of its decay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.config import DtypePolicy, KDAConfig, ModelConfig
from k3train.models.kda import KimiDeltaAttention, decay_report
from k3train.models.layout import LocalLayout
from k3train.models.parameters import graph_and_params
from k3train.models.reports import join
from tests.quick import QUICK_COMPILE

BOUND = -4.0


def test_decay_report_counts_real_tokens():
    rng = np.random.default_rng(0)
    decay, a_log, dt_bias = rng.normal(size=(2, 5, 3, 4)), rng.normal(size=3), rng.normal(size=(3, 4))
    decay[0, 1, :2] = 400.0  # at the bound
    segment_ids = np.array([[0, 0, 1, -1, -1], [0, 0, 0, 0, -1]])
    decay[segment_ids < 0] = np.nan
    g = BOUND / (1 + np.exp(-np.exp(a_log)[:, None] * (decay[segment_ids >= 0] + dt_bias)))
    report = decay_report(*(jnp.asarray(x, jnp.float32) for x in (decay, a_log, dt_bias)), BOUND, jnp.asarray(segment_ids))
    joined = join([{name: value[None] for name, value in report.items()}], jnp.asarray(segment_ids) >= 0)
    np.testing.assert_allclose(joined["kda_log_decay"], [np.mean(g)], rtol=1e-6)
    np.testing.assert_allclose(joined["kda_at_bound"], [np.mean(g < 0.99 * BOUND)], rtol=1e-6)
    assert 0 < joined["kda_at_bound"][0] < 0.5 and all(value.shape == (2,) and value.dtype == jnp.float32 for value in report.values())
    nothing = decay_report(*(jnp.asarray(x) for x in (decay, a_log, dt_bias)), BOUND, jnp.full((2, 5), -1))
    assert all((value == 0).all() for value in nothing.values())


def test_layer_reports_on_request_alone():
    config = ModelConfig(d_model=8, kda=KDAConfig(num_heads=2, head_dim=4, gate_lower_bound=BOUND), dtypes=DtypePolicy(compute="float32"))
    graphdef, shapes = graph_and_params(KimiDeltaAttention(config))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)
    x, segment_ids = jnp.asarray(rng.normal(size=(1, 6, 8)), jnp.float32), jnp.array([[0, 0, 0, 1, 1, -1]])

    @jax.jit
    def both(params):
        layer = nnx.merge(graphdef, params)
        return layer(x, segment_ids, LocalLayout()), layer(x, segment_ids, LocalLayout(), collect=True)

    (y, nothing), (same_y, report) = both.lower(params).compile(QUICK_COMPILE)(params)
    assert nothing == {}
    np.testing.assert_array_equal(y, same_y)
    p = jax.tree.map(np.asarray, params)
    z = np.einsum("tr,rhk->thk", np.asarray(x)[0, :5] @ p["decay_down"], p["decay_up"]) + p["dt_bias"]
    expected = BOUND / (1 + np.exp(-np.exp(p["a_log"])[:, None] * z))
    np.testing.assert_allclose(report["kda_log_decay"], 5 * np.mean(expected), rtol=1e-5)  # a sum over five real tokens
