"""The metrics file, across crashes and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from k3train.train import metrics


def test_values_come_back_with_all_their_bits(tmp_path: Path):
    loss = np.float32(1.0) / np.float32(3.0)
    with metrics.JsonLines(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"loss": loss, "load": np.array([1.5, 2.0], np.float32), "tokens": 7})
        assert metrics.read(tmp_path / "m.jsonl") == [{"step": 1, "loss": float(loss), "load": [1.5, 2.0], "tokens": 7}]
    assert np.float32(metrics.read(tmp_path / "m.jsonl")[0]["loss"]) == loss


def test_resume_drops_what_lies_beyond_its_step_and_a_torn_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3)) + '{"step": 2, "heldo')
    with metrics.JsonLines(path, resume_step=2) as writer:
        writer.write(3, {"heldout_loss": 0.25})
    assert [line["step"] for line in metrics.read(path)] == [1, 2, 3]
    assert metrics.last_step_with("heldout_loss", path, up_to=3) == 3
    assert metrics.last_step_with("heldout_loss", path, up_to=2) is None
    assert [child.name for child in tmp_path.iterdir()] == ["m.jsonl"]


def test_nothing_is_dropped_before_the_first_line_comes(tmp_path: Path):
    """A resume that is cut off while it compiles leaves the lines of the later steps, from which the run may still go on."""
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    with metrics.JsonLines(path, resume_step=1):
        pass
    assert [line["step"] for line in metrics.read(path)] == [1, 2, 3]


def test_what_is_not_finite_is_null_so_that_every_reader_takes_the_line(tmp_path: Path):
    with metrics.JsonLines(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"loss": np.float32("nan"), "load": np.array([1.0, np.inf])})
    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: 1 / 0) == {"step": 1, "loss": None, "load": [1.0, None]}
