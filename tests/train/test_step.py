"""The step, on a model small enough to see through: logits are rows of a table, and a side output counts tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.config import OptimizerConfig, ScheduleConfig
from k3train.data.batch import Batch
from k3train.optim import build_optimizer, learning_rates
from k3train.train import state as train_state
from k3train.train.step import build_train_step, split_rows

AXES = {"table": ("vocab", "embed"), "router_bias": ("experts",)}
SCHEDULE = ScheduleConfig(steps=10, warmup_fraction=0.0)
BIAS = ("router_bias",)
RATES = learning_rates(OptimizerConfig(peak_lr=0.1), SCHEDULE)


def forward(params: dict, batch: Batch) -> tuple[jax.Array, dict]:
    """Three experts; a token's choice is its number modulo three, and its required bias lies in bin `token`."""
    tokens = batch.tokens.reshape(-1)
    aux = {
        "expert_load": jnp.zeros((1, 3), jnp.int32).at[0, tokens % 3].add(1),
        "histogram": jnp.zeros((1, 1, 3, 8), jnp.int32).at[0, 0, :, tokens].add(1),
        "max_logit": jnp.max(batch.tokens).astype(jnp.float32)[None, None],
        "not_for_the_step": jnp.zeros(7),
    }
    return params["table"][batch.tokens], aux


def evidence(aux: dict) -> dict:
    return {"histograms": {BIAS: jnp.sum(aux["histogram"], axis=1)[0]}, "loads": {BIAS: aux["expert_load"][0]}, "max_logits": {}}


def example_batch(rows: int = 8, tokens: int = 6) -> Batch:
    """Half of the rows have few real targets."""
    random = np.random.default_rng(1)
    tokens_BT, targets_BT = random.integers(0, 5, (2, rows, tokens)).astype(np.int32)
    mask_BT = (np.arange(tokens) < np.where(np.arange(rows) < rows // 2, 1, tokens)[:, None]).astype(np.float32)
    return Batch(tokens=tokens_BT, targets=targets_BT, segment_ids=tokens_BT * 0, positions=tokens_BT * 0, loss_mask=mask_BT)


def begin() -> tuple[optax.GradientTransformationExtraArgs, train_state.TrainState]:
    optimizer = build_optimizer(OptimizerConfig(peak_lr=0.1), SCHEDULE, AXES, balancing="quantile")
    params = {"table": jax.random.normal(jax.random.key(0), (5, 5)), "router_bias": jnp.zeros(3)}
    return optimizer, train_state.create(params, optimizer)


def step_function(optimizer, microbatches: int = 1, row_shards: int = 1, forward=forward):
    return jax.jit(
        build_train_step(
            forward,
            optimizer,
            evidence=evidence,
            report=lambda aux, grads, updates: {"side_outputs": jnp.array(len(aux)), "load": aux["expert_load"]},
            learning_rates=RATES,
            microbatches=microbatches,
            row_shards=row_shards,
        )
    )


def one_step(batch: Batch, microbatches: int, row_shards: int = 1):
    optimizer, state = begin()
    return step_function(optimizer, microbatches, row_shards)(state, batch)


@pytest.mark.numerics
@pytest.mark.parametrize("microbatches, row_shards", [(2, 1), (4, 1), (2, 2), (8, 1)])
def test_microbatches_make_the_update_of_the_whole_batch(microbatches: int, row_shards: int):
    batch = example_batch()
    (whole, whole_metrics), (split, split_metrics) = one_step(batch, 1), one_step(batch, microbatches, row_shards)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), whole, split)
    assert set(whole_metrics) == set(split_metrics)
    for name, value in whole_metrics.items():
        np.testing.assert_allclose(value, split_metrics[name], rtol=1e-6, err_msg=name)


def test_metrics_and_counters():
    batch = example_batch()
    state, metrics = one_step(batch, 1)
    assert int(state.step) == int(state.optimizer.applied) == 1
    assert float(metrics["tokens"]) == batch.loss_mask.sum()
    assert float(metrics["learning_rate"]) == pytest.approx(float(RATES["learning_rate"](0)))
    assert metrics["load"][0].tolist() == np.bincount(batch.tokens.reshape(-1) % 3, minlength=3).tolist()
    assert int(metrics["side_outputs"]) == 3
    assert int(metrics["skipped_steps"]) == int(metrics["skipped_in_a_row"]) == 0


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_with_nan_changes_nothing_but_the_counters(where: str):
    """Parameters, moments, bias and the schedule's position keep their bits; the next step is as if it were the first."""

    def poisoned(params: dict, batch: Batch) -> tuple[jax.Array, dict]:
        logits, aux = forward(params, batch)
        if where == "loss":
            return logits + jnp.nan, aux
        zero = params["table"][0, 0] * 0.0  # its square root has an infinite slope, its value changes nothing
        return logits + jnp.sqrt(zero), aux

    optimizer, state = begin()
    batch = example_batch()
    poisoned_state, metrics = step_function(optimizer, forward=poisoned)(state, batch)
    assert np.isfinite(metrics["loss"]) == (where == "gradient") and not np.isfinite(metrics["grad_norm"])
    assert int(poisoned_state.step) == int(metrics["skipped_steps"]) == int(metrics["skipped_in_a_row"]) == 1
    counters = {"skipped": 1, "consecutive": 1}
    assert {name: int(getattr(poisoned_state.optimizer, name)) for name in counters} == counters
    gate = poisoned_state.optimizer._replace(**dict.fromkeys(counters, jnp.int32(0)))
    clean = poisoned_state._replace(step=state.step, optimizer=gate)
    jax.tree.map(np.testing.assert_array_equal, clean, state)

    step = step_function(optimizer)
    (after, _), (first, _) = step(poisoned_state, batch), step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.params, first.params)
    assert int(after.optimizer.consecutive) == 0 and int(after.optimizer.skipped) == 1


def test_a_batch_without_targets_changes_nothing_but_by_decay():
    batch = example_batch()
    state, metrics = one_step(batch._replace(loss_mask=batch.loss_mask * 0), 1)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0.0
    assert np.isfinite(state.params["table"]).all()


def test_every_microbatch_takes_its_share_of_each_device():
    """Eight rows on two devices (0-3 and 4-7) in two microbatches: two rows of each device in each."""
    rows = np.arange(8)[:, None]
    split = split_rows(Batch(*(rows,) * 5), parts=2, shards=2)
    assert split.tokens[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
