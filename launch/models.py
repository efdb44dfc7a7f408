"""Models from disk for the commands that use one: a run folder's checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.errors import UserError
from launch.resume import saved_experiment
from launch.train import CONFIG_FILE

if TYPE_CHECKING:
    from k3train.config import ModelConfig

Tree = dict[Any, Any]


def load_model(folder: Path, *, step: int | None = None, float32: bool = False) -> tuple[ModelConfig, Tree]:
    """The configuration and the parameters of a run folder's checkpoint, by default the newest, or of a Hugging Face folder.

    A run computes in its own types, or with `float32` in these; a Hugging Face folder always does the latter.

    Raises:
        UserError: the folder is neither, or what it holds is damaged or does not fit together.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give a run folder or a Hugging Face folder")
    import jax

    from k3train.interop import hugging_face
    from k3train.models import stacks
    from k3train.models.parameters import abstract

    if hugging_face.is_checkpoint(folder):
        if step is not None:
            raise UserError(f"--step {step}: {folder} is a Hugging Face folder, which holds one model; leave --step out")
        config = hugging_face.read_config(folder)
        config = dataclasses.replace(config, dtypes=dataclasses.replace(config.dtypes, parameters="float32", compute="float32"))
        return config, stacks.stack(hugging_face.read_checkpoint(folder, config), config)

    if hugging_face.describes_model(folder):
        raise UserError(f"{folder}: a Hugging Face folder without *.safetensors; put the weights beside its config.json")

    from k3train.train import loop
    from k3train.train.checkpoints import Checkpoints

    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder}: neither a run folder nor a Hugging Face folder; both hold a config.json")
    config = saved_experiment(folder).model
    if float32:
        config = dataclasses.replace(config, dtypes=dataclasses.replace(config.dtypes, compute="float32"))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    _, params, _ = abstract(config)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), params)
    with Checkpoints(folder / loop.CHECKPOINTS_FOLDER, config) as saves:
        return config, saves.restore_params(target, step)


def not_finite(folder: Path, config: ModelConfig, params: Tree, what: str) -> UserError:
    """The error for results that are NaN or infinite; names the first such weight if there is one. Brings all weights to the host."""
    import jax
    import numpy as np

    from k3train.models import stacks

    canonical = stacks.unstack(jax.tree.map(np.asarray, params), config)
    for path, leaf in jax.tree.leaves_with_path(canonical):
        bad = int(np.sum(~np.isfinite(leaf.astype(np.float32))))
        if bad:
            name = ".".join(str(key.key) for key in path)
            return UserError(f"{folder}: the model's weights are not finite: {bad} of {leaf.size} entries of {name}. Use an earlier step.")
    return UserError(f"{folder}: {what} not finite, though all weights are: some activation overflows.")
