"""Checkpoints of a real (tiny) model's state, with random numbers for arrays."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from k3train import config_io
from k3train.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from k3train.errors import UserError
from k3train.models import parameters
from k3train.optim import build_optimizer
from k3train.train import state as train_state
from k3train.train.checkpoints import Checkpoints, Record, canonical
from k3train.train.state import TrainState

SAVES = CheckpointConfig(every_steps=1, keep=2)
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def target(model: ModelConfig) -> TrainState:
    _, params, axes = parameters.abstract(model)
    abstract = train_state.abstract(params, build_optimizer(OptimizerConfig(), ScheduleConfig(), axes))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=DEVICE), abstract)


def example_state(step: int, model: ModelConfig) -> TrainState:
    random = np.random.default_rng(step)
    state = jax.tree.map(lambda leaf: jax.device_put(random.integers(0, 9, leaf.shape).astype(leaf.dtype), DEVICE), target(model))
    return state._replace(step=jax.device_put(np.int32(step), DEVICE))


def record(step: int, model: ModelConfig | None = None) -> Record:
    experiment = {"name": "run", "list": [1, 2]} | ({"model": config_io.to_dict(model)} if model else {})
    return Record(step=step, seconds=1.5, tokens=7, data_fingerprint="abc", experiment=experiment, versions={})


def save(folder: Path, steps: tuple[int, ...], model: ModelConfig) -> None:
    with Checkpoints(folder, model, SAVES) as checkpoints:
        for step in steps:
            checkpoints.save(example_state(step, model), record(step, model))


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def model(tiny_model: ModelConfig) -> ModelConfig:
    """Three layers, of which the last two can be a stack."""
    return dataclasses.replace(tiny_model, num_layers=3, mixer_pattern=("kda", "gated_mla", "gated_mla"), attn_res_block_size=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: ModelConfig) -> Path:
    """Steps 2, 5 and 9 were saved, and two are kept. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(folder, (2, 5, 9), model)
    return folder


def test_a_state_comes_back_bit_for_bit(saved: Path, model: ModelConfig):
    with Checkpoints(saved, model) as checkpoints:
        assert checkpoints.steps() == [5, 9]
        assert checkpoints.record() == record(9, model) and checkpoints.record(5) == record(5, model)
        assert_equal(checkpoints.restore(target(model)), example_state(9, model))
        assert_equal(checkpoints.restore(target(model), 5), example_state(5, model))
        assert_equal(checkpoints.restore_params(target(model).params, 5), example_state(5, model).params)


def test_the_layout_does_not_depend_on_how_layers_are_stacked(saved: Path, model: ModelConfig):
    """With other blocks the same layers lie in other stacks."""
    other = dataclasses.replace(model, attn_res_block_size=1)
    assert jax.tree.structure(target(other)) != jax.tree.structure(target(model))
    with Checkpoints(saved, other) as checkpoints:
        restored = checkpoints.restore(target(other))
    assert_equal(canonical(restored.params, other), canonical(example_state(9, model).params, model))
    assert_equal(canonical(restored.optimizer, other), canonical(example_state(9, model).optimizer, model))


def test_arrays_may_be_reused_as_soon_as_save_returns(tmp_path: Path, model: ModelConfig):
    state = example_state(3, model)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path / "c", model, SAVES) as checkpoints:
        checkpoints.save(state, record(3))
        jax.block_until_ready(overwrite(state))
        checkpoints.wait()
        assert_equal(checkpoints.restore(target(model)), example_state(3, model))


def test_nothing_saved(tmp_path: Path, model: ModelConfig):
    with pytest.raises(UserError, match="no checkpoint here"):
        Checkpoints(tmp_path / "absent", model)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    with Checkpoints(tmp_path / "empty", model) as checkpoints, pytest.raises(UserError, match="no checkpoint here"):
        checkpoints.record()


def test_a_step_that_is_not_there(saved: Path, model: ModelConfig):
    with Checkpoints(saved, model) as checkpoints, pytest.raises(UserError, match="step 3 is not saved here; there are 5, 9"):
        checkpoints.restore(target(model), 3)


def test_another_model(saved: Path, model: ModelConfig):
    for other in (dataclasses.replace(model, dense_dim=40), dataclasses.replace(model, num_layers=2)):
        with Checkpoints(saved, other) as checkpoints, pytest.raises(UserError, match="another model"):
            checkpoints.restore(target(other))


@pytest.mark.parametrize("damage", ["record", "params", "cut off"])
def test_a_damaged_step_is_named_with_the_way_out(damage: str, saved: Path, tmp_path: Path, model: ModelConfig):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    if damage == "record":
        for path in (folder / "9" / "record").iterdir():
            path.write_text("{not json")
    elif damage == "params":
        shutil.rmtree(folder / "9" / "params")
    else:
        for path in (folder / "9" / "params").rglob("d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = sorted(path.name for path in folder.rglob("*"))
    with Checkpoints(folder, model) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.record()
        checkpoints.restore(target(model))
    assert str(folder / "9") in str(error.value) and "other step is 5" in str(error.value)
    assert sorted(path.name for path in folder.rglob("*")) == before
