"""What a run leaves behind."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from k3train.errors import UserError
from k3train.train import result

RESULT = result.Result(
    name="small",
    heldout_bits_per_byte=2.25,
    heldout_loss=1.56,
    baselines={"order_1": 3.52, "order_3": 1.99},
    seconds=3723.0,
    tokens=1024,
    steps=8,
    parameters=1234567,
    versions={"python": "3.13"},
)


def test_result_comes_back_from_its_file(tmp_path: Path):
    RESULT.save(tmp_path / "result.json")
    assert result.Result.load(tmp_path / "result.json") == RESULT


def test_the_table_ranks_the_run_among_the_counts():
    console = Console(file=io.StringIO(), width=100)
    result.print_table(RESULT, console)
    text = console.file.getvalue()
    assert text.index("3.520") < text.index("2.250") < text.index("1.990")
    assert "1,234,567 parameters" in text and "1:02:03" in text


# A step that was left out, and an evaluation under weights that overflow.
SKIPPED = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None, "skipped": "the head"}, {"step": 2, "heldout_bits_per_byte": None}]


@pytest.mark.parametrize(
    "lines", [[], [{"step": step, "loss": 3.0 / step} for step in range(1, 9)] + [{"step": 8, "heldout_bits_per_byte": 2.0}], SKIPPED]
)
def test_the_loss_curve_is_a_picture(lines: list, tmp_path: Path):
    result.draw_loss_curve(lines, RESULT.baselines, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_a_finite_loss_comes_last():
    console = Console(file=io.StringIO(), width=100)
    result.print_table(dataclasses.replace(RESULT, heldout_bits_per_byte=None), console)
    text = console.file.getvalue()
    assert text.index("not finite") < text.index("3.520")


def test_smoothing_keeps_straight_lines():
    line = [3.0 - 0.1 * step for step in range(50)]
    assert result.smooth(line) == pytest.approx(line)
    assert result.smooth([1.0, -1.0] * 40)[20:60] == pytest.approx([0.0] * 40, abs=0.12)
    assert result.smooth([2.0]) == [2.0]


def test_a_torn_result_is_named(tmp_path: Path):
    (tmp_path / "result.json").write_text('{"name": "sm')
    with pytest.raises(UserError, match="result.json: not the result of a run"):
        result.Result.load(tmp_path / "result.json")
