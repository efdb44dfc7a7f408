"""Orbax checkpoints in the canonical per-layer layout, which depends on no mesh and no stacking.

A step's folder holds three items: `params` and `optimizer` (nested dicts of arrays, named by path) and `record` (JSON: everything
else that the run needs to go on). A folder is whole or absent: Orbax writes beside it and renames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from k3train import config_io
from k3train.config import CheckpointConfig, ModelConfig
from k3train.errors import UserError
from k3train.models import stacks
from k3train.train.state import TrainState, Tree, path_of

FORMAT = 1
KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "dict": dict}  # of the record's fields, as JSON gives them


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint holds besides arrays."""

    step: int
    seconds: float
    """Wall time of the run so far, over all its resumes."""
    tokens: int
    """Real targets trained on so far."""
    data_fingerprint: str
    experiment: dict[str, Any]
    """The resolved config."""
    versions: dict[str, str]
    format: int = FORMAT


class Checkpoints:
    """The saves of one run, in one folder. Use as a context: leaving it waits until the last save is whole."""

    def __init__(self, folder: Path, model: ModelConfig, config: CheckpointConfig | None = None):
        """Opens the folder for reading, or with `config` also for saving (then it is made if absent)."""
        self.folder, self._model = folder, model
        if config is None and not folder.is_dir():
            raise _nothing_saved(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep if config else None, create=config is not None)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        # Slicing every stack leaf by leaf would compile a program per shape.
        self._unstack = jax.jit(lambda params, optimizer: (canonical(params, model), canonical(optimizer, model)))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """Every whole step, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, record: Record) -> None:
        """Starts to save; the arrays are copied before it returns, so that the state may be donated.

        Raises:
          UserError: this save, or the one before, could not be written.
        """
        params, optimizer = self._unstack(state.params, state.optimizer)
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params), optimizer=ocp.args.StandardSave(optimizer), record=ocp.args.JsonSave(asdict(record))
        )
        with self._writing():
            self._manager.check_for_errors()
            self._manager.save(record.step, args=items, force=True)

    def wait(self) -> None:
        """Returns when the last save is whole on disk; raises `UserError` if it could not be written."""
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the file system, TensorStore and Orbax each have their own
            whole = self.steps()
            raise UserError(
                f"{self.folder}: a checkpoint could not be written ({type(error).__name__}: {_first_line(error)}).\n"
                + (f"The newest whole step is {whole[-1]}. " if whole else "No step is saved. ")
                + "Make room or mend the folder's permissions, then resume the run."
            ) from error

    def record(self, step: int | None = None) -> Record:
        """Reads the record of a step, by default the newest.

        Raises:
          UserError: nothing is saved here, or the step is missing or damaged.
        """
        step = self._existing(step)
        data = self._read(step, "record", ocp.args.JsonRestore())
        kinds = {item.name: KINDS[str(item.type).partition("[")[0]] for item in fields(Record)}
        known = isinstance(data, dict) and set(data) == set(kinds) and all(isinstance(data[name], kind) for name, kind in kinds.items())
        if not known or data["format"] != FORMAT or data["step"] != step:
            raise UserError(f"{self.folder / str(step)}: not a checkpoint of this version of k3train (record format {FORMAT} expected).")
        return Record(**data)

    def restore(self, target: TrainState, step: int | None = None) -> TrainState:
        """Restores a step, by default the newest, into the shapes, dtypes and shardings of `target`.

        Raises:
          UserError: nothing is saved here, or the step is missing, damaged or of another model.
        """
        step = self._existing(step)
        params = self.restore_params(target.params, step)
        optimizer = self._arrays(step, "optimizer", target.optimizer)
        return TrainState(step=jax.device_put(np.int32(step), target.step.sharding), params=params, optimizer=optimizer)

    def restore_params(self, target: Tree, step: int | None = None) -> Tree:
        """Restores the parameters alone; raises like `restore`."""
        return self._arrays(self._existing(step), "params", target)

    def _arrays(self, step: int, item: str, target: Tree) -> Tree:
        restored = self._read(step, item, ocp.args.StandardRestore(canonical(target, self._model)))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        join = jax.jit(lambda leaves: stored(leaves, target, self._model), out_shardings=shardings)
        return join(restored)

    def _read(self, step: int, item: str, how: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # Orbax, TensorStore, JSON and the file system each have their own
            if item != "record" and self._of_another_model(step):
                raise UserError(f"{self.folder / str(step)}: saved by another model than the run's configuration describes.") from error
            others = [other for other in self.steps() if other != step]
            remedy = (
                f"The newest other step is {others[-1]}: move the folder {step} away to go on from there."
                if others
                else "No other step is saved here."
            )
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint's {item} cannot be read"
                f" ({type(error).__name__}: {_first_line(error)}).\n{remedy} Nothing was changed."
            ) from error

    def _of_another_model(self, step: int) -> bool:
        """Whether the record names a model of other parameters. How it computes (dtypes, remat) makes no other model."""
        saved, wanted = self.record(step).experiment.get("model"), config_io.to_dict(self._model)
        return isinstance(saved, dict) and any(
            saved.get(name) != value for name, value in wanted.items() if name not in ("dtypes", "remat")
        )

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise _nothing_saved(self.folder)
        if step is not None and step not in steps:
            raise UserError(f"{self.folder}: step {step} is not saved here; there are {', '.join(map(str, steps))}.")
        return steps[-1] if step is None else step


def canonical(tree: Tree, config: ModelConfig) -> dict[str, Any]:
    """A tree of params or of the optimizer as nested dicts of canonical leaves, keyed by path."""
    result: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(stacks.unstack_tree(tree, config))[0]:
        *folders, name = path_of(path)
        node = result
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return result


def stored(leaves: dict[str, Any], target: Tree, config: ModelConfig) -> Tree:
    """The inverse of `canonical`; `target` is a tree of the result's structure."""

    def find(path: tuple[Any, ...], _: Any) -> Any:
        node: Any = leaves
        for name in path_of(path):
            node = node[name]
        return node

    return stacks.stack_tree(jax.tree_util.tree_map_with_path(find, stacks.unstack_tree(target, config)), config)


def _nothing_saved(folder: Path) -> UserError:
    return UserError(
        f"{folder}: no checkpoint here: the run was cut off before its first save, or this is no run's folder.\n"
        f"Move {folder.parent} away and give the `k3train train` command again. Nothing was changed."
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no details")[:300]
