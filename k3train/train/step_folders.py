"""The folders of saved steps: which are whole, what makes way for a new save, and which go once a newer one is there.

* `12`: a whole step. It got this name after its manifest was written.
* `12.saving` and what begins so: a save under way, or one that was cut off if no process trains here.
* `12.unfinished`: such a save, seen by a resumed run. Deleted once a step as late is whole.
* `12.no-manifest`: a folder named like a step that is no whole step, renamed by a resumed run. Kept.
* `12.superseded`: a whole step that a run resumed from an earlier one leaves behind. Kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3train.config import CheckpointConfig
from k3train.train import manifest

SAVING, UNFINISHED, NO_MANIFEST, SUPERSEDED, DELETING = ".saving", ".unfinished", ".no-manifest", ".superseded", ".deleting"


def whole(folder: Path) -> list[int]:
    """Every step with a manifest, oldest first."""
    return [step for step in _numbered(folder) if manifest.exists(folder / str(step))]


def without_manifest(folder: Path) -> list[int]:
    """Every step's folder that has no manifest: copied in part, or saved by an early version."""
    return [step for step in _numbered(folder) if not manifest.exists(folder / str(step))]


def make_way(folder: Path, after: int) -> Iterator[str]:
    """Renames what would be in the way of a run that goes on from step `after`; yields a sentence about each thing.

    That is: every cut-off save, every folder without a manifest, and whole steps that are later than `after`.
    """
    for path in _entries(folder):
        step, kind = _step(path), _kind(path)
        if kind.startswith(SAVING):
            new = _set_aside(path, f"{step}{UNFINISHED}")
            yield f"The save of step {step} was cut off: it is now {new}, and goes once a newer step is saved."
        elif kind == "" and not manifest.exists(path):
            new = _set_aside(path, f"{step}{NO_MANIFEST}")
            yield f"Step {step} has no {manifest.FILE}, so it is not whole: it is now {new}."
        elif kind == "" and step > after:
            new = _set_aside(path, f"{step}{SUPERSEDED}")
            yield f"The run goes on from step {after}: its earlier step {step} is now {new}."


def commit(saved: Path, step: int) -> None:
    """Gives a finished folder with its manifest the step's name, for good."""
    final = saved.with_name(str(step))
    if final.exists():  # `make_way` left nothing, so somebody has put it there since
        _set_aside(final, f"{step}{SUPERSEDED if manifest.exists(final) else NO_MANIFEST}")
    os.rename(saved, final)
    for path in (final, final.parent):
        _sync(path)


def surplus(steps: Iterable[int], config: CheckpointConfig) -> list[int]:
    """Which of the steps are not kept: all but the newest `keep` and the multiples of `keep_every_steps`."""
    older = sorted(steps)[: -config.keep]
    return [step for step in older if not config.keep_every_steps or step % config.keep_every_steps]


def prune(folder: Path, config: CheckpointConfig) -> None:
    """Deletes surplus whole steps, and unfinished saves older than the newest whole one.

    A step loses its name first, so that no folder of a step's name is ever in part deleted.
    """
    steps = whole(folder)
    for step in surplus(steps, config):
        _set_aside(folder / str(step), f"{step}{DELETING}")
    for path in _entries(folder):
        if _kind(path).startswith(DELETING) or (_kind(path).startswith(UNFINISHED) and _step(path) <= steps[-1]):
            shutil.rmtree(path)


def _entries(folder: Path) -> list[Path]:
    """Every folder whose name begins with a step's number."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.partition(".")[0].isdecimal() and path.is_dir())
    return sorted(found, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _kind(path: Path) -> str:
    """What follows the number: empty, or one of the endings, perhaps with a count."""
    return path.name.removeprefix(path.name.partition(".")[0])


def _numbered(folder: Path) -> list[int]:
    return [_step(path) for path in _entries(folder) if path.name == str(_step(path))]


def _set_aside(path: Path, name: str) -> Path:
    """Renames a folder, to a name that is free; returns the new path."""
    new, count = path.with_name(name), 1
    while new.exists():
        count += 1
        new = path.with_name(f"{name}-{count}")
    os.rename(path, new)
    return new


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems have no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
