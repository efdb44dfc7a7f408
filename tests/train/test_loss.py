"""Cross-entropy as sum and count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from k3train.train.loss import cross_entropy


def example(rows: int = 3, tokens: int = 5, vocab: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    logits_BTV = random.normal(0.0, 3.0, (rows, tokens, vocab)).astype(np.float32)
    targets_BT = random.integers(0, vocab, (rows, tokens)).astype(np.int32)
    mask_BT = (random.random((rows, tokens)) < 0.6).astype(np.float32)
    return logits_BTV, targets_BT, mask_BT


def test_equals_the_definition_over_real_targets():
    logits_BTV, targets_BT, mask_BT = example()
    wide_BTV = logits_BTV.astype(np.float64)
    log_p_BTV = wide_BTV - np.log(np.sum(np.exp(wide_BTV), axis=-1, keepdims=True))
    expected = -np.sum(np.take_along_axis(log_p_BTV, targets_BT[..., None], axis=-1)[..., 0] * mask_BT)
    nats, count = cross_entropy(logits_BTV, targets_BT, mask_BT)
    np.testing.assert_allclose(nats, expected, rtol=1e-6)
    assert float(count) == mask_BT.sum()


def test_gradient_is_probability_minus_one_hot():
    logits_BTV, targets_BT, mask_BT = example()
    gradient = jax.grad(lambda logits: cross_entropy(logits, targets_BT, mask_BT)[0])(logits_BTV)
    expected = (jax.nn.softmax(logits_BTV) - jax.nn.one_hot(targets_BT, logits_BTV.shape[-1])) * mask_BT[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_narrow_logits_are_evaluated_in_float32():
    logits_BTV, targets_BT, mask_BT = example()
    narrow_BTV = jnp.asarray(logits_BTV, jnp.bfloat16)
    nats, count = cross_entropy(narrow_BTV, targets_BT, mask_BT)
    assert nats.dtype == count.dtype == jnp.float32
    np.testing.assert_array_equal(nats, cross_entropy(narrow_BTV.astype(jnp.float32), targets_BT, mask_BT)[0])
