"""`k3train score` on a Hugging Face folder, and train, resume and score on a run of two steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3train.errors import UserError
from launch import cli
from tests.golden import FOLDER, load

GOLDEN = FOLDER / "model_tiny"


@pytest.fixture
def tokens(tmp_path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, load("model_tiny/io")["token_ids"])
    return path


def score(model: Path, tokens: Path, out: Path, *options: str) -> int:
    return cli.main(["score", str(model), "--tokens", str(tokens), "--out", str(out), *options])


def refusal(capsys, *arguments) -> str:
    assert score(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("k3train: ") and "Traceback" not in message
    assert not list(arguments[2].parent.glob("*.partial"))
    return message


@pytest.mark.numerics
def test_golden_logits(tmp_path):
    """Three rows in batches of two: the last batch is not full."""
    io = load("model_tiny/io")
    order = [1, 0, 1]
    np.save(tmp_path / "tokens.npy", io["token_ids"][order].astype(np.int64))
    assert score(GOLDEN, tmp_path / "tokens.npy", tmp_path / "logits.npy", "--batch-size", "2") == 0
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, io["logits"][order], rtol=0, atol=2e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npy", "tokens.npy"]
    (tmp_path / "plain").touch()
    assert (tmp_path / "logits.npy").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_existing_output_is_kept_unless_told(tmp_path, tokens, capsys):
    out = tmp_path / "logits.npy"
    out.write_text("mine")
    assert "--overwrite" in refusal(capsys, GOLDEN, tokens, out)
    assert out.read_text() == "mine"


def test_file_called_partial_is_kept_and_compilations_too(tmp_path, tokens, monkeypatch):
    enabled = []
    monkeypatch.setattr("k3train.train.compile_cache.enable", lambda: enabled.append(True))
    mine = tmp_path / "logits.npy.partial"
    mine.write_text("mine")
    assert score(GOLDEN, tokens, tmp_path / "logits.npy") == 0
    assert mine.read_text() == "mine" and enabled
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npy", "logits.npy.partial", "tokens.npy"]


def test_temporary_file_goes_when_the_model_fails(tmp_path, tokens, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise UserError("no space")

    monkeypatch.setattr("launch.score.os.replace", fail)
    assert "no space" in refusal(capsys, GOLDEN, tokens, tmp_path / "logits.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_output_that_is_a_folder(tmp_path, tokens, capsys):
    (tmp_path / "logits").mkdir()
    for options in ([], ["--overwrite"]):
        assert "logits is a folder" in refusal(capsys, tmp_path / "no_model_is_read", tokens, tmp_path / "logits", *options)


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((2, 3), np.float32), "must hold integer token ids [B, T], at least one; found float32 [2, 3]"),
        (np.zeros(3, np.int32), "found int32 [3]"),
        (np.zeros((0, 3), np.int32), "found int32 [0, 3]"),
        (np.array([[0, 256]]), "token ids run from 0 to 256, but the model's vocabulary is 0 to 255"),
        (np.array([[-1, 5]]), "token ids run from -1 to 5"),
    ],
)
def test_tokens_that_do_not_fit(tmp_path, capsys, array, message):
    np.save(tmp_path / "tokens.npy", array)
    assert message in refusal(capsys, GOLDEN, tmp_path / "tokens.npy", tmp_path / "logits.npy")
    assert not (tmp_path / "logits.npy").exists()


def test_tokens_that_are_no_array(tmp_path, capsys):
    path, out = tmp_path / "tokens.npy", tmp_path / "logits.npy"
    assert "cannot be read" in refusal(capsys, GOLDEN, path, out)
    path.write_text("1 2 3")
    message = refusal(capsys, GOLDEN, path, out)
    assert "not an .npy array" in message and "numpy.save" in message and "pickle" not in message
    path.write_bytes(b"PK\3\4 cut short")
    assert "not an .npy array" in refusal(capsys, GOLDEN, path, out)
    with path.open("wb") as file:
        np.savez(file, a=np.zeros((1, 2), np.int32))
    assert "several arrays" in refusal(capsys, GOLDEN, path, out)


def test_models_that_are_none(tmp_path, tokens, capsys):
    out = tmp_path / "logits.npy"
    assert "no such folder" in refusal(capsys, tmp_path / "none", tokens, out)
    (tmp_path / "empty").mkdir()
    assert "neither a run" in refusal(capsys, tmp_path / "empty", tokens, out)
    for text in ('{"model_type": "kimi_linear"}', '{"architectures": []}', '{"text_config": {}}'):
        (tmp_path / "empty" / "config.json").write_text(text)
        message = refusal(capsys, tmp_path / "empty", tokens, out)
        assert "a Hugging Face folder without *.safetensors" in message and message.count("\n") == 1
    assert "must be at least 1" in refusal(capsys, GOLDEN, tokens, out, "--batch-size", "0")
    assert "does not exist" in refusal(capsys, GOLDEN, tokens, tmp_path / "none" / "logits.npy")


def test_missing_and_misshapen_tensors(tmp_path, tokens, capsys):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(GOLDEN / "config.json", model)
    tensors = load_file(GOLDEN / "model.safetensors")
    head, norm = "language_model.lm_head.weight", "language_model.model.norm.weight"
    del tensors[head]
    tensors[norm] = tensors[norm][:-1]
    save_file(tensors, model / "model.safetensors")
    message = refusal(capsys, model, tokens, tmp_path / "logits.npy")
    assert f"{head} (expected shape [256, 64]): missing" in message
    assert f"{norm} (model.safetensors): has shape [63], expected [64]" in message


def test_weights_that_are_not_finite(tmp_path, tokens, capsys):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(GOLDEN / "config.json", model)
    tensors = load_file(GOLDEN / "model.safetensors")
    tensors["language_model.model.layers.3.self_attn.kv_b_proj.weight"][0, 0] = np.nan
    save_file(tensors, model / "model.safetensors")
    message = refusal(capsys, model, tokens, tmp_path / "logits.npy")
    assert f"{model}: the model's weights are not finite: 1 of 1024 entries of layers.3.mixer.k_up" in message
    assert not (tmp_path / "logits.npy").exists()


def test_train_resume_and_score(tiny_experiment, tmp_path, capsys):
    assert cli.main(["train", str(tiny_experiment), "--seed", "7"]) == 0
    folder = tiny_experiment.parent / "runs" / "tiny"
    assert json.loads((folder / "config.json").read_text())["seed"] == 7
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()

    assert cli.main(["resume", str(folder)]) == 0
    assert "is finished" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["train", str(tiny_experiment)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == files

    np.save(tmp_path / "tokens.npy", np.arange(40, dtype=np.int32).reshape(2, 20))
    assert score(folder, tmp_path / "tokens.npy", tmp_path / "logits.npy") == 0
    logits = np.load(tmp_path / "logits.npy")
    assert logits.shape == (2, 20, 257) and np.all(np.isfinite(logits)) and np.std(logits) > 0
    assert score(folder, tmp_path / "tokens.npy", tmp_path / "other.npy", "--step", "99") == 2
    assert "step 99 is not saved here" in " ".join(capsys.readouterr().err.split())
