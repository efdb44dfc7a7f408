"""A step with a NaN or an infinity changes nothing but the counters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.config import OptimizerConfig, ScheduleConfig
from k3train.optim import build_optimizer

AXES = {
    "mixer": {"q_up": ("q_rank", "heads", "head_dim"), "k_up": ("kv_rank", "heads", "head_dim"), "q_norm": ("norm",)},
    "ffn": {"w_gate": ("experts", "latent", "expert_mlp"), "router_bias": ("experts",)},
    "embed": {"embedding": ("vocab", "embed")},
}
SIZES = {
    "q_rank": 4,
    "kv_rank": 4,
    "heads": 2,
    "head_dim": 4,
    "norm": 4,
    "experts": 4,
    "latent": 4,
    "expert_mlp": 6,
    "vocab": 5,
    "embed": 4,
}
QUERY, BIAS = ("mixer", "q_up"), ("ffn", "router_bias")
OPTIMIZER = build_optimizer(
    OptimizerConfig(qk_clip=1.0), ScheduleConfig(steps=10, warmup_fraction=0.5, final_fraction=0.0), AXES, balancing="quantile"
)


def tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    draw = lambda axes: rng.normal(size=[SIZES[axis] for axis in axes]).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, AXES, is_leaf=lambda node: isinstance(node, tuple))


@jax.jit
def step(params, state, grads, loss):
    extra = {
        "histograms": {BIAS: jnp.asarray(np.random.default_rng(0).multinomial(40, np.ones(20) / 20, size=4), jnp.int32)},
        "loads": {BIAS: jnp.array([40, 20, 10, 10], jnp.int32)},
        "max_logits": {QUERY: jnp.array([0.5, 3.0])},
    }
    updates, state = OPTIMIZER.update(grads, state, params, loss=loss, **extra)
    return optax.apply_updates(params, updates), state


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def begun() -> tuple[dict, object]:
    """After one good step, so that no moment is zero."""
    params = tree(0)
    return step(params, OPTIMIZER.init(params), tree(1), jnp.float32(2.0))


def bad_step(where: str, value: float) -> tuple[dict, jax.Array]:
    grads = tree(2)
    if where == "loss":
        return grads, jnp.float32(value)
    module, leaf = where.split("/")
    grads[module][leaf].flat[1] = value
    return grads, jnp.float32(2.0)


PLACES = ["loss", *(f"{module}/{leaf}" for module, leaves in AXES.items() for leaf in leaves)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", PLACES)
def test_a_bad_step_changes_nothing(begun, where: str, value: float):
    params, state = begun
    grads, loss = bad_step(where, value)
    after_params, after = step(params, state, grads, loss)
    assert bits(after_params) == bits(params)
    assert bits(after.inner) == bits(state.inner)
    assert (int(after.applied), int(after.skipped), int(after.consecutive)) == (1, 1, 1)


def test_a_good_step_changes_every_leaf_and_the_count_of_bad_ones_ends(begun):
    """The second good step is the same whether or not bad ones lie between, counts aside."""
    params, state = begun
    straight_params, straight = step(params, state, tree(3), jnp.float32(1.0))
    for leaf, (before, after) in enumerate(zip(bits(params), bits(straight_params), strict=True)):
        assert before != after, f"leaf {leaf}"
    between = state
    for _ in range(2):
        _, between = step(params, between, *bad_step("loss", np.nan))
    assert int(between.consecutive) == 2
    late_params, late = step(params, between, tree(3), jnp.float32(1.0))
    assert bits(late_params) == bits(straight_params) and bits(late.inner) == bits(straight.inner)
    assert (int(late.applied), int(late.skipped), int(late.consecutive)) == (2, 2, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((late_params, late)))


def test_the_state_can_be_donated():
    """Each counter has a buffer of its own."""
    params = jax.tree.map(jnp.asarray, tree(0))
    donated = jax.jit(step, donate_argnums=(0, 1))
    _, state = donated(params, jax.jit(OPTIMIZER.init)(params), tree(1), jnp.float32(1.0))
    assert int(state.applied) == 1
    params = jax.tree.map(jnp.asarray, tree(0))
    donated(params, OPTIMIZER.init(params), tree(1), jnp.float32(1.0))
