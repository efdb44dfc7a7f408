"""The norm over all gradients and the clip, against plain arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.optim.global_norm import clip_by_global_norm, global_norm

TREE = {"a": np.array([3.0, 0.0], np.float32), "b": {"c": np.full((2, 2), 2.0, np.float32)}}  # norm 5


def test_the_norm_is_over_all_leaves_in_float32():
    assert float(global_norm(TREE)) == 5.0
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), TREE)
    assert global_norm(low).dtype == jnp.float32 and float(global_norm(low)) == 5.0


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25])
def test_the_norm_is_finite_if_all_is_and_no_square_overflows(value: float):
    assert not np.isfinite(global_norm({**TREE, "d": np.float32(value)}))


@pytest.mark.parametrize("limit, factor", [(2.5, 0.5), (5.0, 1.0), (7.0, 1.0)])
def test_the_clip_scales_to_the_limit_or_leaves_alone(limit: float, factor: float):
    clip = clip_by_global_norm(limit)
    clipped, _ = clip.update(TREE, clip.init(TREE))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, factor * y, rtol=1e-6), clipped, TREE)


def test_zero_gradients_stay_zero():
    clip = clip_by_global_norm(1.0)
    clipped, _ = clip.update({"a": jnp.zeros(3)}, clip.init(None))
    np.testing.assert_array_equal(clipped["a"], 0.0)
