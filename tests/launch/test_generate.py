"""`k3train generate` on a run's first values: what is printed, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from k3train.data.tokenizer import ByteTokenizer
from launch import cli, generate
from launch.models import load_model, not_finite
from tests.golden import FOLDER

GOLDEN = FOLDER / "model_tiny"
NEW = 6  # tokens at most, in all runs of this file


def said(capsys, *arguments) -> str:
    assert cli.main(["generate", *map(str, arguments), "--max-new-tokens", str(NEW)]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments) -> str:
    assert cli.main(["generate", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("k3train: ") and "Traceback" not in captured.err
    return captured.err


def test_text(saved_run, tmp_path, capsys):
    drawn = said(capsys, saved_run, "--prompt", "né ")
    assert drawn.startswith("né ") and drawn.endswith("\n") and len(drawn) > len("né \n")
    assert said(capsys, saved_run, "--prompt", "né ", "--step", "1") == drawn
    assert said(capsys, saved_run, "--prompt", "né ", "--seed", "1") != drawn
    (tmp_path / "prompt.txt").write_text("né ", encoding="utf-8")
    assert said(capsys, saved_run, "--prompt-file", tmp_path / "prompt.txt") == drawn

    assert said(capsys, saved_run).strip("\n")  # no prompt: a new document


def test_samples(saved_run, capsys):
    lines = said(capsys, saved_run, "--prompt", "a", "--num-samples", "3").replace("\r", "")
    parts = [lines.split(f"--- sample {number} of 3 ---\n")[1].split("\n--- sample")[0] for number in (1, 2, 3)]
    assert all(part.startswith("a") for part in parts) and len(set(parts)) > 1


def test_tokens_are_those_of_the_text(saved_run, capsys):
    text = said(capsys, saved_run, "--prompt", "ab", "--seed", "3")
    ids = [int(number) for number in said(capsys, saved_run, "--tokens", "256, 97,98", "--seed", "3").strip().split(",")]
    assert len(ids) == NEW and 256 not in ids
    assert text == "ab" + ByteTokenizer().decode(ids) + "\n"


def test_character_across_two_pieces(monkeypatch, saved_run, capsys):
    text = "naïve".encode()
    pieces = [np.array([[*text[:3]]]), np.array([[*text[3:], -1]])]
    monkeypatch.setattr("k3train.inference.generate.stream", lambda *_, **__: iter(pieces))
    monkeypatch.setattr(generate, "load_model", lambda *_, **__: (load_config(saved_run), {}))
    assert said(capsys, saved_run, "--prompt", "so ") == "so naïve\n"


def load_config(folder):
    from launch.resume import saved_experiment

    return saved_experiment(folder).model


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["--num-samples", "-1"], "--num-samples -1: must be at least 1"),
        (["--temperature", "nan"], "--temperature nan: must be 0, or at least 0.001"),
        (["--temperature", "-0.1"], "--temperature -0.1: must be 0, or at least 0.001"),
        (["--top-k", "0"], "--top-k 0: must be at least 1"),
        (["--top-p", "0"], "--top-p 0.0: must be above 0"),
        (["--top-p", "1.5"], "--top-p 1.5: must be above 0 and at most 1"),
        (["--seed", "-1"], "--seed -1: must be between"),
        (["--tokens", "1,x"], "--tokens 1,x: must be whole numbers"),
        (["--tokens", "1,257"], "each from 0 to 256"),
        (["--tokens", ""], "at least one id"),
        (["--step", "9"], "step 9 is not saved here"),
        (["--prompt", "a", "--tokens", "1"], "not allowed with"),
    ],
)
def test_options(saved_run, capsys, options, message):
    assert message in refusal(capsys, saved_run, *options)


def test_prompt_files(saved_run, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\1")
    assert "binary (holds a zero byte)" in refusal(capsys, saved_run, "--prompt-file", tmp_path / "binary")
    assert "is a folder" in refusal(capsys, saved_run, "--prompt-file", tmp_path)
    assert "No such file" in refusal(capsys, saved_run, "--prompt-file", tmp_path / "none")


def test_folders(tmp_path, capsys):
    assert "no such folder" in refusal(capsys, tmp_path / "none")
    assert "neither a run folder" in refusal(capsys, tmp_path)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(capsys, tmp_path / "file")
    assert "which holds one model" in refusal(capsys, GOLDEN, "--tokens", "1", "--step", "1")
    assert "a Hugging Face folder; its tokenizer is not read, so give --tokens" in refusal(capsys, GOLDEN)


def test_weights_that_are_not_finite(monkeypatch, saved_run, capsys):
    config, params = load_model(saved_run)
    params["head"]["kernel"] = params["head"]["kernel"].at[1, :2].set(np.nan)
    monkeypatch.setattr(generate, "load_model", lambda *_, **__: (config, params))
    message = refusal(capsys, saved_run, "--max-new-tokens", str(NEW))
    assert f"{saved_run}: the model's weights are not finite: 2 of {16 * 257} entries of head.kernel" in message


def test_results_that_are_not_finite_of_weights_that_are(saved_run):
    config, params = load_model(saved_run)
    assert "the loss is not finite, though all weights are" in str(not_finite(saved_run, config, params, "the loss is"))
