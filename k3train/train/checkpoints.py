"""Orbax checkpoints in the canonical per-layer layout, which depends on no mesh and no stacking.

A step's folder holds three items, `params` and `optimizer` (nested dicts of arrays, named by path) and `record` (JSON: everything
else that the run needs to go on), and a manifest with a checksum per file. A folder of a step's name is whole or absent: Orbax writes
to `<step>.saving`, then the manifest is written there, and the last thing is the step's name. All of that but the copy of the arrays
to the host happens in the background.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from k3train.train import manifest, step_folders
from k3train.train.orbax_errors import CAUSES, cause, quiet
from k3train.train.state import TrainState, Tree, path_of

FORMAT = 2
KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "dict": dict}  # of the record's fields, as JSON gives them
ITEMS = ("params", "optimizer", "record")


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


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Checkpoints:
    """The saves of one run, in one folder. Use as a context: leaving it waits until the last save is whole."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        config: CheckpointConfig | None = None,
        *,
        notify: Callable[[str], None] = _to_stderr,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Opens the folder for reading, or with `config` also for saving (then it is made if absent).

        Args:
          folder: `checkpoints` of a run folder.
          model: whose parameters are saved.
          config: when to save and what to keep.
          notify: takes a sentence about what was passed over or renamed.
          clock: seconds, for `config.every_minutes`.
        """
        self.folder, self._model, self._config, self._notify, self._clock = folder, model, config, notify, clock
        if config is None and not folder.is_dir():
            raise _nothing_saved(folder)
        if config is not None:
            with self._writing("the folder"):
                folder.mkdir(parents=True, exist_ok=True)
        # Folders are made at once: in the background, Orbax would wait five minutes for one that cannot be made.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._saver = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=at_once)
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: tuple[int, Future[None]] | None = None  # the newest save, until it is known to be whole
        self._saved_at = clock()
        self._checked: set[tuple[int, str]] = set()
        # Slicing every stack leaf by leaf would compile a program per shape.
        self._unstack = jax.jit(lambda params, optimizer: (canonical(params, model), canonical(optimizer, model)))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        of_the_disk = error if self._config is not None and isinstance(error, OSError) and error.errno in CAUSES else None
        try:
            # Of two errors the first is told; but where the disk fails, the save that failed with it says more.
            with contextlib.suppress(UserError) if kind and not of_the_disk else contextlib.nullcontext():
                self.wait()
        finally:
            self._background.shutdown(wait=False)
            for orbax in (self._saver, self._reader):
                with contextlib.suppress(Exception):  # of a failed save, told already
                    orbax.close()
        if of_the_disk:
            where = of_the_disk.filename or self.folder.parent
            raise UserError(f"{where}: {of_the_disk.strerror}.\n{self._go_on()}") from error

    def steps(self) -> list[int]:
        """Every whole step, oldest first."""
        return step_folders.whole(self.folder)

    def due(self, step: int) -> bool:
        """Whether a save is due after `step` updates, by `every_steps` or `every_minutes`. Cheap: to be asked after every update.

        Raises:
          UserError: the last save could not be written.
        """
        if self._last is not None and self._last[1].done():
            self.wait()
        if self._config is None:
            return False
        minutes = self._config.every_minutes
        return step % self._config.every_steps == 0 or (minutes is not None and self._clock() - self._saved_at >= 60.0 * minutes)

    def save(self, state: TrainState, record: Record) -> None:
        """Starts to save; the arrays are copied before it returns, so that the state may be donated.

        Raises:
          UserError: this save, or the one before, could not be written.
        """
        self.wait()
        params, optimizer = self._unstack(state.params, state.optimizer)
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(params), optimizer=ocp.args.StandardSave(optimizer), record=ocp.args.JsonSave(asdict(record))
        )
        saving = self.folder / f"{record.step}{step_folders.SAVING}"
        with self._writing(f"step {record.step}"), quiet():
            self._saver.save(saving.absolute(), args=items)
        self._last = record.step, self._background.submit(self._finish, saving, record.step)
        self._saved_at = self._clock()

    def wait(self) -> None:
        """Returns when the last save is whole on disk; raises `UserError` if it could not be written."""
        if self._last is None:
            return
        (step, finished), self._last = self._last, None
        with self._writing(f"step {step}"):
            finished.result()

    def _finish(self, saving: Path, step: int) -> None:
        """In the background: waits for Orbax, then makes the step whole and deletes what is not kept."""
        with quiet():
            self._saver.wait_until_finished()
        if jax.process_index() != 0:
            return
        manifest.write(saving)
        step_folders.commit(saving, step)
        try:
            step_folders.prune(self.folder, self._config or CheckpointConfig())
        except OSError as error:
            self._notify(f"{error.filename}: an old step could not be deleted ({error.strerror}). Step {step} is saved.")

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the file system, TensorStore and Orbax each have their own
            raise UserError(f"{self.folder}: {what} could not be saved ({cause(error)}).\n{self._go_on()}") from error

    def _go_on(self) -> str:
        """What to do after a failed write."""
        whole, run = self.steps(), self.folder.parent
        if whole:
            return f"The newest whole step is {whole[-1]}. Make room or mend the folder's permissions, then go on: k3train resume {run}"
        return (
            f"No step is saved yet. Make room or mend the folder's permissions, move {run} away and give the `k3train train` command again."
        )

    def record(self, step: int | None = None) -> Record:
        """Reads the record of a step, by default the newest whole one. The record is checked, not the arrays.

        Raises:
          UserError: nothing is saved here, or the step is missing or damaged.
        """
        step = self._existing(step)
        data = self._read(step, "record", ocp.args.JsonRestore())
        kinds = {item.name: KINDS[str(item.type).partition("[")[0]] for item in fields(Record)}
        known = isinstance(data, dict) and set(data) == set(kinds)
        if not known or not all(_is(data[name], kind) for name, kind in kinds.items()) or data["format"] != FORMAT or data["step"] != step:
            raise UserError(f"{self.folder / str(step)}: not a checkpoint of this version of k3train (record format {FORMAT} expected).")
        return Record(**data)

    def check(self, step: int | None = None) -> None:
        """Compares every file of a step, by default the newest, with its manifest. Reads all of it.

        Raises:
          UserError: with the files that are missing, truncated, changed or foreign, and the newest good step.
        """
        step = self._existing(step)
        for item in ITEMS:
            self._check(step, item)

    def restore(self, target: TrainState, step: int | None = None, *, checked: bool = False) -> TrainState:
        """Restores a step, by default the newest whole one, into the shapes, dtypes and shardings of `target`.

        The files are checked first, unless they were `checked` a moment ago. Where the folder is open for saving, the run goes on from
        this step: what is later makes way, under other names.

        Raises:
          UserError: nothing is saved here, or the step is missing, damaged or of another model.
        """
        step = self._existing(step)
        if checked:
            self._checked |= {(step, item) for item in ITEMS}
        self.check(step)
        params = self.restore_params(target.params, step)
        optimizer = self._arrays(step, "optimizer", target.optimizer)
        if self._config is not None and jax.process_index() == 0:
            with self._writing(f"what comes after step {step}"):
                for sentence in step_folders.make_way(self.folder, step):
                    self._notify(sentence)
        return TrainState(step=jax.device_put(np.int32(step), target.step.sharding), params=params, optimizer=optimizer)

    def restore_params(self, target: Tree, step: int | None = None) -> Tree:
        """Restores the parameters alone, after a check of their files; raises like `restore`."""
        return self._arrays(self._existing(step), "params", target)

    def _arrays(self, step: int, item: str, target: Tree) -> Tree:
        restored = self._read(step, item, ocp.args.StandardRestore(canonical(target, self._model)))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        join = jax.jit(lambda leaves: stored(leaves, target, self._model), out_shardings=shardings)
        return join(restored)

    def _read(self, step: int, item: str, how: Any) -> Any:
        self._check(step, item)
        try:
            with quiet():
                return self._reader.restore((self.folder / str(step)).absolute(), args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # Orbax, TensorStore, JSON and the file system each have their own
            if item != "record" and self._of_another_model(step):
                raise UserError(f"{self.folder / str(step)}: saved by another model than the run's configuration describes.") from error
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint's {item} cannot be read ({cause(error)}), though its files are as they were"
                f" saved.\n{self._way_out(step)}"
            ) from error

    def _check(self, step: int, item: str) -> None:
        """Raises `UserError` if a file of the item, or one beside the items, is not as it was saved."""
        if (step, item) in self._checked:
            return
        found = manifest.faults(self.folder / str(step), leave_out=set(ITEMS) - {item})
        if found:
            more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
            listed = "".join(f"\n  {fault}" for fault in found[:5])
            raise UserError(f"{self.folder / str(step)}: step {step} is damaged:{listed}{more}\n{self._way_out(step)}")
        self._checked.add((step, item))

    def _way_out(self, damaged: int) -> str:
        """Names the newest step that can be used instead; reads steps until one is good."""
        others = (step for step in reversed(self.steps()) if step != damaged)
        good = next((step for step in others if not manifest.faults(self.folder / str(step))), None)
        if good is None:
            return "No good step is saved here. Bring the files back from a copy, or start the run anew. Nothing was changed."
        return f"The newest good step is {good}. To use it, give the command again with --step {good}. Nothing was changed."

    def _of_another_model(self, step: int) -> bool:
        """Whether the record names a model of other parameters. How it computes (dtypes, remat) makes no other model."""
        saved, wanted = self.record(step).experiment.get("model"), config_io.to_dict(self._model)
        return isinstance(saved, dict) and any(
            saved.get(name) != value for name, value in wanted.items() if name not in ("dtypes", "remat")
        )

    def _existing(self, step: int | None) -> int:
        """The step, or the newest whole one; says so if a newer one is passed over."""
        whole, torn = self.steps(), step_folders.without_manifest(self.folder)
        if step in torn:
            raise UserError(f"{self.folder}: step {step} is not whole: it has no {manifest.FILE}. {_listed(whole)}")
        if not whole:
            raise _nothing_saved(self.folder, torn)
        if step is not None and step not in whole:
            raise UserError(f"{self.folder}: step {step} is not saved here. {_listed(whole)}")
        if step is None and torn and torn[-1] > whole[-1]:
            self._notify(f"Step {torn[-1]} in {self.folder} is passed over: it has no {manifest.FILE}, so it is not whole.")
        return whole[-1] if step is None else step


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


def _is(value: object, kind: Any) -> bool:
    """Whether a JSON value is of the kind; true and false are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _listed(whole: list[int]) -> str:
    return f"There are {', '.join(map(str, whole))}." if whole else "No step is."


def _nothing_saved(folder: Path, torn: list[int] | None = None) -> UserError:
    what = (
        f"no whole checkpoint here: step {torn[-1]} has no {manifest.FILE} (copied in part, or saved by an early version of k3train)."
        if torn
        else "no checkpoint here: the run was cut off before its first save, or this is no run's folder."
    )
    return UserError(f"{folder}: {what}\nMove {folder.parent} away and give the `k3train train` command again. Nothing was changed.")
