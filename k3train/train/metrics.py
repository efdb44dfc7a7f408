"""Numbers over the course of a run: the protocol of their writers, and the writer of JSON lines.

Each line is one object with `step` (updates made) and either training figures (`loss`, ...) or held-out ones (`heldout_loss`, ...).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Line = dict[str, Any]


class MetricWriter(Protocol):
    """Where metrics go."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes figures (floats, or arrays over layers) and notes (texts) of the state after `step` steps."""
        ...

    def close(self) -> None:
        """Nothing is written after this."""
        ...


class JsonLines:
    """`metrics.jsonl`: a line per call, in the file when the call returns."""

    def __init__(self, path: Path, *, resume_step: int = 0):
        """Appends to the file. What an interrupted run wrote beyond `resume_step` goes with the first line, so that no step appears twice,
        and not before: until then the run may still go on from a later step.
        """
        self._path, self._resume_step, self._file = path, resume_step, path.open("a", encoding="utf-8")
        self._cut = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """See `MetricWriter.write`."""
        if not self._cut:
            self._cut_tail()
        try:
            self._file.write(_line({"step": step, **{name: plain(value) for name, value in values.items()}}))
            self._file.flush()
        except OSError as error:  # an error of writing does not know its file
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _cut_tail(self) -> None:
        lines = read(self._path)
        keep = [line for line in lines if line["step"] <= self._resume_step]
        if self._path.stat().st_size:  # a torn line goes too
            rewritten = self._path.with_suffix(".tmp")
            rewritten.write_text("".join(map(_line, keep)), encoding="utf-8")
            os.replace(rewritten, self._path)
            self._file.close()
            self._file = self._path.open("a", encoding="utf-8")
        self._cut = True

    def close(self) -> None:
        """See `MetricWriter.close`."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class All:
    """Every one of several writers."""

    def __init__(self, writers: Sequence[MetricWriter]):
        self._writers = writers

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """See `MetricWriter.write`."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """See `MetricWriter.close`."""
        for writer in self._writers:
            writer.close()


def read(path: Path) -> list[Line]:
    """Every whole line of a metrics file; a line torn by a crash, or not of ours, is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def last_step_with(name: str, path: Path, *, up_to: int) -> int | None:
    """Step of the newest line up to a step that has the figure; None without a file."""
    lines = read(path) if path.exists() else []
    return next((line["step"] for line in reversed(lines) if name in line and line["step"] <= up_to), None)


def plain(value: Any) -> Any:
    """An array or number as JSON holds it. A float32 keeps all its digits: reading it back gives the same bits.

    JSON has no NaN and no infinity: they become None.
    """
    array = np.asarray(value)
    return _finite(array.tolist()) if array.dtype.kind in "fiub" else value


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values) + "\n"
