"""Counts for quantile balancing against exact reference counts, of one batch, of its shards, and without padding."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_dispatch import router_histogram
from tests.golden import load

pytestmark = pytest.mark.numerics

count = jax.jit(router_histogram, static_argnames="bins")


@pytest.mark.parametrize("name", ["qb_a_single", "qb_b_single"])
def test_golden_counts(name):
    a = load(name)
    bias, bins = a["bias"], int(a["num_bins"])
    low, width = bias.min() - 1, (bias.max() - bias.min() + 2) / bins
    everyone = np.ones(len(a["scores"]), bool)
    np.testing.assert_array_equal(count(a["scores"], a["cutoff"], everyone, low, width, bins=bins), a["histogram"])
    np.testing.assert_array_equal(count(a["scores"], a["cutoff"], a["valid_mask"], low, width, bins=bins), a["valid_histogram"])
    ends = np.cumsum(a["shard_sizes"])
    for end, size, expected in zip(ends, a["shard_sizes"], a["shard_histograms"], strict=True):
        part = slice(end - size, end)
        np.testing.assert_array_equal(count(a["scores"][part], a["cutoff"][part], everyone[part], low, width, bins=bins), expected)


def test_padding_and_values_at_and_beyond_the_edges():
    scores = np.float32([[0.0, 1.0], [0.5, 0.25], [np.nan, np.nan], [9.0, -9.0]])
    cutoffs = np.float32([0.0, 0.5, np.nan, 0.0])
    counts = count(scores, cutoffs, np.array([True, True, False, True]), -1.0, 0.25, bins=8)
    assert counts.dtype == jnp.int32
    expected = np.zeros((2, 8), np.int32)
    expected[0, [4, 4, 0]] = [2, 2, 1]  # 0 and 0 lie on the edge of bin 4; -9 is counted in the first bin
    expected[1, [0, 5, 7]] = 1  # -1, 0.25, and 9 in the last bin
    np.testing.assert_array_equal(counts, expected)


def test_no_array_over_tokens_experts_and_bins():
    jaxpr = jax.make_jaxpr(lambda s, c, r: router_histogram(s, c, r, -1.0, 0.1, bins=50))(
        jnp.ones((64, 4)), jnp.ones(64), jnp.ones(64, bool)
    )
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", str(jaxpr))]
    assert max(sizes) == 64 * 4


def test_bad_arguments():
    with pytest.raises(ValueError, match="differ in tokens"):
        router_histogram(jnp.ones((3, 2)), jnp.ones(2), jnp.ones(3, bool), 0.0, 1.0, bins=4)
    with pytest.raises(ValueError, match="at least one count"):
        router_histogram(jnp.ones((3, 2)), jnp.ones(3), jnp.ones(3, bool), 0.0, 1.0, bins=0)
