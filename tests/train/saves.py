"""States of a real (tiny) model with random numbers for arrays, and how to save them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax

from k3train import config_io
from k3train.config import CheckpointConfig, ModelConfig
from k3train.models import parameters
from k3train.train import state as train_state
from k3train.train.checkpoints import Checkpoints, Record
from k3train.train.state import TrainState

SAVES = CheckpointConfig(every_steps=1, keep=2)
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def target(model: ModelConfig) -> TrainState:
    """With an optimizer whose state is a tuple of counters and trees like the parameters."""
    _, params, _ = parameters.abstract(model)
    abstract = train_state.abstract(params, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
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


def listing(folder: Path) -> dict[str, bytes]:
    """Every file under the folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
