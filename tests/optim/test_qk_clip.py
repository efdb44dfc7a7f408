"""QK-Clip against reference arrays: weights after the clip, and the logits that they give.

Legend: B rows, T tokens, H heads, K channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.optim.qk_clip import head_factors, qk_clip
from tests.golden import check, load
from tests.quick import QUICK_COMPILE

GOLDEN = load("qk_clip")
NOPE, ROPE, VALUE = (int(n) for n in GOLDEN["dims_nope_rope_v"])
HEADS = len(GOLDEN["smax"])
TAU = float(GOLDEN["tau"])
QUERY = ("mixer", "q_up")


def ours(q_b: np.ndarray, kv_b: np.ndarray) -> dict[str, Any]:
    """Released matrices [out, in] as leaves [in, H, K]."""
    q_up = q_b.reshape(HEADS, NOPE + ROPE, -1).transpose(2, 0, 1)
    kv_up = kv_b.reshape(HEADS, NOPE + VALUE, -1).transpose(2, 0, 1)
    return {"mixer": {"q_up": q_up, "k_up": kv_up[..., :NOPE], "v_up": kv_up[..., NOPE:]}, "other": {"q_up": q_up}}


BEFORE, AFTER = ours(GOLDEN["q_b_proj"], GOLDEN["kv_b_proj"]), ours(GOLDEN["q_b_proj_clipped"], GOLDEN["kv_b_proj_clipped"])


def clipped(params: dict, updates: dict, max_logits: dict) -> dict:
    """Parameters after the update and the clip."""
    rule = qk_clip(TAU)

    def step(params: dict, updates: dict) -> dict:
        return optax.apply_updates(params, rule.update(updates, rule.init(params), params, max_logits=max_logits)[0])

    return jax.jit(step, compiler_options=QUICK_COMPILE)(params, updates)


def largest_logits(mixer: dict) -> np.ndarray:
    """Of each head, over causal pairs of one document."""
    q_BTHK = np.einsum("btq,qhk->bthk", GOLDEN["c_q"], mixer["q_up"])
    k_BTHN = np.einsum("btc,chn->bthn", GOLDEN["c_kv"], mixer["k_up"])
    shared_BTHR = np.repeat(GOLDEN["k_rope"][:, :, None], HEADS, axis=2)
    logits_BHTS = np.einsum("bthk,bshk->bhts", q_BTHK, np.concatenate([k_BTHN, shared_BTHR], -1)) * (NOPE + ROPE) ** -0.5
    segments_T = GOLDEN["segment_ids"][0]
    seen_TS = np.tril(segments_T[:, None] == segments_T[None, :])
    return np.where(seen_TS, logits_BHTS, -np.inf).max(axis=(0, 2, 3))


def zeros_like(tree: dict) -> dict:
    return jax.tree.map(np.zeros_like, tree)


@pytest.mark.numerics
def test_golden_weights_and_logits():
    """No head is above the limit afterwards, and a second clip finds nothing to do. What has no logit is not touched."""
    check(largest_logits(BEFORE["mixer"]), GOLDEN["smax"], 1e-5, "largest logits")
    after = clipped(BEFORE, zeros_like(BEFORE), {QUERY: GOLDEN["smax"]})
    for name in ("q_up", "k_up", "v_up"):
        check(after["mixer"][name], AFTER["mixer"][name], 1e-5, name)
    np.testing.assert_array_equal(after["other"]["q_up"], BEFORE["other"]["q_up"])
    logits = largest_logits(after["mixer"])
    check(logits, GOLDEN["smax_after"], 1e-5, "largest logits after")
    assert np.all(logits <= TAU * (1 + 1e-5)) and np.any(GOLDEN["smax"] > 1.2 * TAU)
    again = clipped(after, zeros_like(after), {QUERY: logits.astype(np.float32)})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), after, again)


def test_the_clip_scales_weight_plus_update_layer_by_layer():
    params = jax.tree.map(lambda x: np.stack([x, x, x]), {"mixer": BEFORE["mixer"]})
    updates = jax.tree.map(lambda x: np.float32(0.1) * np.flip(x, 1), params)
    max_logits = np.array([[TAU, 0.0, -TAU, np.finfo(np.float32).min], [4 * TAU] * 4, [2 * TAU, 0, 0, 0]], np.float32)
    after = clipped(params, updates, {QUERY: max_logits})["mixer"]
    moved = jax.tree.map(np.add, params, updates)["mixer"]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), after, moved)
    np.testing.assert_allclose(after["q_up"][1, ..., :NOPE], moved["q_up"][1, ..., :NOPE] / 2, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(after["q_up"][1, ..., NOPE:], moved["q_up"][1, ..., NOPE:] / 4, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(after["k_up"][1], moved["k_up"][1] / 2, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(after["k_up"][2, :, 0], moved["k_up"][2, :, 0] / np.sqrt(2), rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(after["k_up"][2, :, 1:], moved["k_up"][2, :, 1:])
    np.testing.assert_array_equal(after["v_up"], moved["v_up"])


def test_factors():
    """No pair at all is -inf or the least number; nothing that is no number clips."""
    logits = np.array([20.0, 10.0, 9.0, -20.0, -np.inf, np.finfo(np.float32).min, np.nan, np.inf], np.float32)
    np.testing.assert_allclose(head_factors(jnp.asarray(logits), 10.0), [0.5, 1, 1, 1, 1, 1, 1, 1])


def test_a_path_without_queries_is_refused():
    with pytest.raises(ValueError, match="largest logits given for .*elsewhere"):
        clipped(BEFORE, zeros_like(BEFORE), {("elsewhere", "q_up"): GOLDEN["smax"]})
