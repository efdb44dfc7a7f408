"""Which tokens can be drawn, and how often."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.inference.sampling import Sampling, sample

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 4000


def shares(sampling: Sampling) -> np.ndarray:
    """How often each token is drawn."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 3.0, (DRAWS, 5))
    ids = sample(logits, jax.random.split(jax.random.key(1), DRAWS), sampling)
    assert ids.dtype == jnp.int32 and ids.shape == (DRAWS,)
    return np.bincount(ids, minlength=5) / DRAWS


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(), PROBABILITIES),
        (Sampling(temperature=0.5), PROBABILITIES**2),
        (Sampling(top_k=1), [0, 1, 0, 0, 0]),
        (Sampling(top_k=3), [0, 0.4, 0, 0.3, 0.15]),
        (Sampling(top_k=99), PROBABILITIES),
        (Sampling(top_p=1.0), PROBABILITIES),
        (Sampling(top_p=0.3), [0, 1, 0, 0, 0]),
        (Sampling(top_p=0.69), [0, 0.4, 0, 0.3, 0]),
        (Sampling(top_p=0.71), [0, 0.4, 0, 0.3, 0.15]),
        (Sampling(top_k=2, top_p=0.6), [0, 0.4, 0, 0.3, 0]),  # of the two, the first has 4/7
        (Sampling(top_k=2, top_p=0.55), [0, 1, 0, 0, 0]),
        (Sampling(temperature=0.0, top_k=3, top_p=0.9), [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_shares(sampling, expected):
    expected = np.asarray(expected) / np.sum(expected)
    found = shares(sampling)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / DRAWS**0.5)


def test_greedy_takes_the_first_of_equals_and_needs_no_luck():
    logits = jnp.array([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]])
    for seed in range(3):
        ids = sample(logits, jax.random.split(jax.random.key(seed), 2), Sampling(temperature=0.0))
        np.testing.assert_array_equal(ids, [1, 0])


def test_a_row_is_drawn_by_its_own_key():
    logits = jax.random.normal(jax.random.key(0), (6, 50))
    keys = jax.random.split(jax.random.key(2), 6)
    draw = jax.jit(partial(sample, sampling=Sampling(top_k=20, top_p=0.9)))
    together = draw(logits, keys)
    alone = [draw(logits[row : row + 1], keys[row : row + 1])[0] for row in range(6)]
    np.testing.assert_array_equal(together, alone)
    assert len(set(together.tolist())) > 1
