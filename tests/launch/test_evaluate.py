"""`k3train evaluate`: the figures that training would write, on the run's text and on other."""

from __future__ import annotations

import json
import math

import pytest

from launch import cli


def evaluate(capsys, *arguments) -> dict:
    assert cli.main(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments) -> str:
    assert cli.main(["evaluate", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("k3train: ") and "Traceback" not in captured.err
    return captured.err


def test_figures_of_an_untrained_model(saved_run, tmp_path, capsys):
    """It is near the uniform distribution over 257 tokens, and other text has another length."""
    newest, first = evaluate(capsys, saved_run, "--batches", "50"), evaluate(capsys, saved_run, "--batches", "50", "--step", "1")
    assert (newest.pop("step"), first.pop("step")) == (2, 1) and newest == first
    assert newest["heldout_loss"] == pytest.approx(math.log(257), abs=0.1)
    assert newest["bytes"] == newest["heldout_bytes"] > 0 and newest["text_of_the_run"]
    few = evaluate(capsys, saved_run)
    assert few["batches"] == 1 and few["bytes"] < newest["bytes"]  # evaluation.batches of the run

    for name, text in (("a", "short"), ("b", "a longer text")):
        (tmp_path / f"{name}.txt").write_text(text)
    other = evaluate(capsys, saved_run, "--data.sources", tmp_path / "a.txt", tmp_path / "b.txt")
    assert other["heldout_bytes"] in (5, 13) and not other["text_of_the_run"]

    assert cli.main(["evaluate", str(saved_run)]) == 0
    assert f"step 2: {few['heldout_bits_per_byte']:.4f} bits per byte" in capsys.readouterr().out


def test_errors(saved_run, tmp_path, capsys):
    assert "must be at least 1" in refusal(capsys, saved_run, "--batches", "0")
    assert "no such folder" in refusal(capsys, tmp_path / "none")
    assert "is a file" in refusal(capsys, saved_run / "config.json")
    assert "is not a run" in refusal(capsys, tmp_path)
    assert "step 7 is not saved here" in refusal(capsys, saved_run, "--step", "7")
    assert "does not exist" in refusal(capsys, saved_run, "--data.sources", tmp_path / "none.txt")
