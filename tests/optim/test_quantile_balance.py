"""Router biases: reference arrays, the sequence of ten updates, a skewed frozen batch, and the two other rules.

Legend: S tokens, E experts, k active experts per token, N bins.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.optim.quantile_balance import balance, exact, sign_step, solve
from tests.golden import load
from tests.quick import QUICK_COMPILE

BIAS = ("ffn", "router_bias")
run_solve = jax.jit(solve, compiler_options=QUICK_COMPILE)
run_exact = jax.jit(exact, static_argnames="k", compiler_options=QUICK_COMPILE)


def route(scores_SE: np.ndarray, bias_E: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Load of each expert and cutoff of each token, in NumPy."""
    biased_SE = scores_SE + bias_E
    order_SE = np.argpartition(-biased_SE, k, axis=1)
    load_E = np.bincount(order_SE[:, :k].ravel(), minlength=scores_SE.shape[1]).astype(np.int32)
    return load_E, np.take_along_axis(biased_SE, order_SE[:, k : k + 1], axis=1)[:, 0]


def count(scores_SE: np.ndarray, bias_E: np.ndarray, cutoff_S: np.ndarray, bins: int) -> np.ndarray:
    """Histogram [E, N] of cutoff - score over [min(bias) - 1, max(bias) + 1], in NumPy."""
    low, width = bias_E.min() - 1, (np.ptp(bias_E) + 2) / bins
    bin_SE = np.clip(np.floor((cutoff_S[:, None] - scores_SE - low) / width), 0, bins - 1).astype(int)
    experts = bias_E.size
    return np.bincount((bin_SE + bins * np.arange(experts)).ravel(), minlength=experts * bins).reshape(experts, bins).astype(np.int32)


@pytest.fixture(params=["qb_a_single", "qb_b_single"])
def golden(request) -> dict[str, np.ndarray]:
    return load(request.param)


@pytest.mark.numerics
def test_golden_estimate(golden):
    """From the stored counts: whole, summed over shards, and of the real tokens alone."""
    near = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    near(run_solve(golden["histogram"], golden["bias"], golden["load"]), golden["new_bias"])
    near(run_solve(golden["shard_histograms"].sum(axis=0), golden["bias"], golden["load"]), golden["new_bias"])
    valid = golden["valid_mask"]
    load_E = np.bincount(golden["topk_ids"][valid].ravel(), minlength=len(golden["bias"])).astype(np.int32)
    assert load_E.sum() / len(load_E) == golden["valid_target"]
    near(run_solve(golden["valid_histogram"], golden["bias"], load_E), golden["valid_new_bias"])


@pytest.mark.numerics
def test_golden_exact(golden):
    near = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    k = int(golden["k"])
    near(run_exact(golden["scores"], golden["bias"], k=k), golden["exact_bias"])
    garbage = np.where(golden["valid_mask"][:, None], golden["scores"], np.float32(0.9))
    of_valid = run_exact(golden["scores"][golden["valid_mask"]], golden["bias"], k=k)
    near(run_exact(garbage, golden["bias"], k=k, mask_S=golden["valid_mask"]), of_valid)
    raised = golden["bias_hat"] - golden["exact_lower"]
    assert np.all(np.abs(raised) <= golden["bin_width"])  # the estimate is near the ceil(q)-th value


@pytest.mark.numerics
def test_golden_sequence():
    """Ten updates on a frozen batch, each from the counts under the bias of the one before."""
    golden = load("qb_sequence")
    scores, k, bins = golden["scores"], int(golden["k"]), int(golden["num_bins"])
    estimate = order = np.zeros(scores.shape[1], np.float32)
    for t in range(11):
        load_E, cutoff = route(scores, estimate, k)
        exact_load_E, _ = route(scores, order, k)
        width = 2 * (np.ptp(estimate) + 2) / bins
        np.testing.assert_allclose(estimate, golden["hist_bias"][t], rtol=0, atol=width, err_msg=f"estimate {t}")
        np.testing.assert_allclose(order, golden["exact_bias"][t], rtol=0, atol=1e-5, err_msg=f"exact {t}")
        np.testing.assert_allclose(load_E.max() / load_E.mean(), golden["hist_max_over_target"][t], rtol=0, atol=0.02)
        np.testing.assert_allclose(exact_load_E.max() / load_E.mean(), golden["exact_max_over_target"][t], rtol=0, atol=0.02)
        estimate = np.asarray(run_solve(count(scores, estimate, cutoff, bins), estimate, load_E))
        order = np.asarray(run_exact(scores, order, k=k))


@pytest.mark.numerics
@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_frozen_batch_is_even_after_few_updates(seed: int):
    """64 experts, top 4: from a max load over mean above 5 to below 1.2 in two updates of the estimate, below 1.1 in five of the exact.

    Experts differ as much as tokens do. Where they differ twice as much (11 to 15 of at most 16 to begin with), either form takes
    three or four updates to come below 1.2: that is the rule's own pace.
    """
    rng, k, bins = np.random.default_rng(seed), 4, 1000
    logits = rng.normal(size=(8192, 64)) + rng.normal(size=64)
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    estimate = order = np.zeros(64, np.float32)

    def skew(bias: np.ndarray) -> float:
        load_E, _ = route(scores, bias, k)
        return load_E.max() / load_E.mean()

    assert skew(estimate) > 5.0
    for _ in range(2):
        load_E, cutoff = route(scores, estimate, k)
        estimate = np.asarray(run_solve(count(scores, estimate, cutoff, bins), estimate, load_E))
    for _ in range(5):
        order = np.asarray(run_exact(scores, order, k=k))
    assert skew(estimate) < 1.2
    assert skew(order) < 1.1


def test_the_target_is_exact_beyond_float32():
    """A target 3 above 2^24: in float32 it would be 4 above, and the third expert's share 1."""
    q = 2**24 + 3
    histogram = np.array([[q - 1, 1, 0, 5], [q, 0, 0, 5], [q - 2, 0, 4, 3]], np.int32)
    solved = run_solve(histogram, np.zeros(3, np.float32), np.array([q - 1, q, q + 1], np.int32))
    bins = np.array([2.0, 1.0, 2.5])  # ends of two bins, the middle of a third
    np.testing.assert_allclose(solved, (bins - bins.mean()) * 0.5, atol=1e-6)


def test_no_real_token_leaves_the_bias_and_layers_do_not_mix():
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(2, 8)).astype(np.float32)
    scores = rng.uniform(size=(100, 8)).astype(np.float32)
    load_E, cutoff = route(scores, bias[1], 2)
    histogram = np.stack([np.zeros((8, 50), np.int32), count(scores, bias[1], cutoff, 50)])
    solved = np.asarray(run_solve(histogram, bias, np.stack([0 * load_E, load_E])))
    np.testing.assert_array_equal(solved[0], bias[0])
    np.testing.assert_allclose(solved[1], run_solve(histogram[1], bias[1], load_E), atol=1e-6)
    np.testing.assert_array_equal(run_exact(scores, bias[0], k=2, mask_S=np.zeros(100, bool)), bias[0])


def test_the_sign_rule():
    load_E = np.array([[4, 1, 1], [2, 2, 2], [0, 0, 1], [2**24 + 1, 2**24, 2**24]], np.int32)
    expected = [[-1, 1, 1], [0, 0, 0], [1, 1, -1], [-1, 1, 1]]
    np.testing.assert_allclose(sign_step(jnp.asarray(load_E), 0.5), np.multiply(0.5, expected))


def test_the_update_replaces_the_bias():
    """Whatever the gradient; an absent path is left alone, an unknown one is refused."""
    golden = load("qb_a_single")
    bias = jnp.asarray(golden["bias"])
    params = {"ffn": {"router_bias": bias}, "other": {"router_bias": bias}}
    grads = jax.tree.map(jnp.ones_like, params)

    def update(balancing, histograms=None, loads=None, momentum=0.0) -> dict:
        rule = balance(balancing, sign_rate=0.25, quantile_momentum=momentum)
        given = {"histograms": histograms or {BIAS: golden["histogram"]}, "loads": loads or {BIAS: golden["load"]}}
        return rule.update(grads, rule.init(params), params, **given)[0]

    quantile, sign, none = update("quantile"), update("sign"), update("none")
    np.testing.assert_allclose(bias + quantile["ffn"]["router_bias"], golden["new_bias"], atol=1e-6)
    smoothed = update("quantile", momentum=0.75)["ffn"]["router_bias"]
    np.testing.assert_allclose(bias + smoothed, 0.75 * bias + 0.25 * golden["new_bias"], atol=1e-6)
    np.testing.assert_array_equal(sign["ffn"]["router_bias"], 0.25 * np.sign(golden["target_load"] - golden["load"]))
    for updates in (quantile["other"], sign["other"], none["ffn"], none["other"]):
        np.testing.assert_array_equal(updates["router_bias"], 0.0)
    with pytest.raises(ValueError, match="expert loads given for .*nowhere"):
        update("quantile", loads={("nowhere",): golden["load"]})
