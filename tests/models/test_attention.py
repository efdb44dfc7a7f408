"""Softmax attention in XLA: blocks of queries, documents, padding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.models import attention
from k3train.models.attention import causal_attention, latent_attention
from tests.quick import QUICK_COMPILE

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)


def inputs(tokens: int, batch: int = 2):
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=(batch, tokens, 2, width)).astype(np.float32) for width in (12, 12, 8, 8))
    segment_ids = np.stack([np.arange(tokens) // 7, np.where(np.arange(tokens) < tokens - 5, 0, -1)]).astype(np.int32)
    return q, k, v, do, segment_ids


def reference(q, k, v, segment_ids, scale):
    """Row by row in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    o, largest = np.zeros(v.shape), np.full(q.shape[2], -np.inf)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t] >= 0]
        if seen:
            logits = scale * k[b, seen, h] @ q[b, t, h]
            largest[h] = max(largest[h], logits.max())
            p = np.exp(logits - logits.max())
            o[b, t, h] = p / p.sum() @ v[b, seen, h]
    return o, largest


@pytest.mark.numerics
def test_documents_and_padding():
    q, k, v, _, segment_ids = inputs(33)
    o, max_logit = jit(lambda *a: causal_attention(*a, scale=0.3, segment_ids_BT=segment_ids))(q, k, v)
    expected, largest = reference(q, k, v, np.asarray(segment_ids), 0.3)
    np.testing.assert_allclose(o, expected, atol=2e-6)
    np.testing.assert_allclose(max_logit, largest, rtol=1e-5)
    assert not np.any(o[1, -5:])


@pytest.mark.numerics
def test_blocks_of_queries_change_nothing(monkeypatch):
    q, k, v, do, segment_ids = inputs(50)

    def run(q, k, v):
        o, max_logit = causal_attention(q, k, v, scale=0.3, segment_ids_BT=segment_ids, query_block=16)
        return jnp.sum(o * do), (o, max_logit)

    direct = jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    monkeypatch.setattr(attention, "DIRECT_LIMIT", 8)
    blocked = jit(jax.value_and_grad(lambda *a: run(*a), argnums=(0, 1, 2), has_aux=True))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), blocked, direct)


def test_bfloat16_keeps_a_float32_output():
    q, k, v, _, _ = inputs(9)
    o, max_logit = jax.eval_shape(lambda *a: causal_attention(*a, scale=0.3), *(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert o.dtype == max_logit.dtype == jnp.float32


@pytest.mark.numerics
def test_kept_latents_give_what_expanded_keys_and_values_do():
    """A row's queries after different numbers of kept tokens; the kept ones beyond are not seen."""
    rng = np.random.default_rng(4)
    latent, shared, k_up, v_up, q = (
        rng.normal(size=s).astype(np.float32) for s in ((2, 9, 5), (2, 9, 3), (5, 2, 4), (5, 2, 6), (2, 2, 2, 7))
    )
    seen = np.arange(9) <= np.array([[3, 4], [7, 8]])[:, :, None]
    k = np.concatenate([np.einsum("bsc,chn->bshn", latent, k_up), np.repeat(shared[:, :, None], 2, axis=2)], axis=-1)
    logits = np.where(seen[:, None], 0.3 * np.einsum("bthk,bshk->bhts", q, k), -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhts,bshv->bthv", p / p.sum(-1, keepdims=True), np.einsum("bsc,chv->bshv", latent, v_up))
    o = jit(lambda *a: latent_attention(*a, scale=0.3, seen_BTS=seen))(q, latent, shared, k_up, v_up)
    np.testing.assert_allclose(o, expected, atol=3e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_kept_latents_in_bfloat16_one_query_a_row(batch):
    shapes = (batch, 1, 2, 7), (batch, 9, 5), (batch, 9, 3), (5, 2, 4), (5, 2, 6)
    arrays = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    o = jit(lambda *a: latent_attention(*a, scale=0.3, seen_BTS=jnp.ones((batch, 1, 9), bool)))(*arrays)
    assert o.dtype == jnp.float32
    np.testing.assert_allclose(o, 5.0)
