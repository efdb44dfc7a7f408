"""The step, on a model small enough to see through: logits are rows of a table, and a side output counts tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import OptimizerConfig, ScheduleConfig
from k3train.data.batch import Batch
from k3train.optim import build_optimizer, warmup_cosine
from k3train.train import state as train_state
from k3train.train.step import build_train_step, split_rows

AXES = {"table": ("vocab", "embed"), "router_bias": ("experts",)}
OPTIMIZER, SCHEDULE = OptimizerConfig(peak_lr=0.1), ScheduleConfig(steps=10, warmup_fraction=0.0)


def forward(params: dict, batch: Batch) -> tuple[jax.Array, dict]:
    load = jnp.zeros((1, 3), jnp.int32).at[0, batch.tokens.reshape(-1) % 3].add(1)
    return params["table"][batch.tokens], {"expert_load": load, "max_logit": jnp.max(batch.tokens).astype(jnp.float32)[None, None]}


def example_batch(rows: int = 8, tokens: int = 6) -> Batch:
    """Half of the rows have few real targets."""
    random = np.random.default_rng(1)
    tokens_BT, targets_BT = random.integers(0, 5, (2, rows, tokens)).astype(np.int32)
    mask_BT = (np.arange(tokens) < np.where(np.arange(rows) < rows // 2, 1, tokens)[:, None]).astype(np.float32)
    return Batch(tokens=tokens_BT, targets=targets_BT, segment_ids=tokens_BT * 0, positions=tokens_BT * 0, loss_mask=mask_BT)


def one_step(batch: Batch, microbatches: int, row_shards: int = 1):
    optimizer = build_optimizer(OPTIMIZER, SCHEDULE, AXES)
    params = {"table": jax.random.normal(jax.random.key(0), (5, 5)), "router_bias": jnp.zeros(3)}
    step = build_train_step(
        forward, optimizer, warmup_cosine(OPTIMIZER.peak_lr, SCHEDULE), microbatches=microbatches, row_shards=row_shards
    )
    return jax.jit(step)(train_state.create(params, optimizer), batch)


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
    assert int(state.step) == 1
    assert float(metrics["tokens"]) == batch.loss_mask.sum()
    assert float(metrics["learning_rate"]) == pytest.approx(float(warmup_cosine(0.1, SCHEDULE)(0)))
    load = np.bincount(batch.tokens.reshape(-1) % 3, minlength=3)
    np.testing.assert_allclose(metrics["expert_load_max_over_mean"], [load.max() / load.mean()], rtol=1e-6)
    np.testing.assert_array_equal(state.params["router_bias"], 0.0)


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
