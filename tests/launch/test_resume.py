"""`k3train resume`: its options, and runs that go on with other settings."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from k3train import config_io
from k3train.errors import UserError
from k3train.train.resume import Resume
from launch import cli, experiments, resume
from launch.train import new_run_folder


@pytest.fixture
def folder(tiny_experiment: Path, tmp_path: Path) -> Path:
    return new_run_folder(experiments.resolve(tiny_experiment, ["--runs-folder", str(tmp_path)], "k3train train"))


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: object):
    """The experiment and the request that the command hands on."""
    calls = []
    monkeypatch.setattr("k3train.train.loop.run", lambda experiment, folder, *, resume, console: calls.append((experiment, folder, resume)))
    parser = argparse.ArgumentParser()
    resume.add_arguments(parser)
    resume.run(parser.parse_args([str(argument) for argument in arguments]))
    return calls[0]


def test_plain(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert asked(monkeypatch, folder) == (config_io.load(folder / "config.json"), folder, Resume())


@pytest.mark.parametrize("before", [True, False])
def test_options_stand_before_or_after_the_run(before: bool, folder: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["--step", "7", "--allow-changed", "data", "--allow-changed=learning-rate"]
    _, _, request = asked(monkeypatch, *((*options, folder) if before else (folder, *options)))
    assert request == Resume(step=7, allow=frozenset({"data", "learning-rate"}))


def test_fields_and_options_mix(folder: Path, monkeypatch: pytest.MonkeyPatch):
    experiment, _, request = asked(
        monkeypatch, folder, "--schedule.steps", 9, "--step", 4, "--checkpoint.keep=2", "--allow-changed", "learning-rate"
    )
    assert (experiment.schedule.steps, experiment.checkpoint.keep, experiment.data.batch_size) == (9, 2, 2)
    assert request == Resume(step=4, allow=frozenset({"learning-rate"}))
    assert config_io.load(folder / "config.json").schedule.steps == 2  # the command itself writes nothing


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "many"], "--step: invalid int value: 'many'"),
        (["--allow-changed", "model"], "--allow-changed: invalid choice: 'model'"),
        (["--schedule.step", "3"], "unknown field --schedule.step; did you mean --schedule.steps"),
        (["--schedule.steps", "-3"], "schedule.steps = -3"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError) as error:
        asked(monkeypatch, folder, *arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\udcff"])
def test_a_damaged_configuration(content: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as error:
        asked(monkeypatch, folder)
    assert str(folder / "config.json") in str(error.value)


def test_a_file_in_the_place_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        asked(monkeypatch, tmp_path / "file")


@pytest.mark.parametrize(
    "error, said",
    [
        (PermissionError(13, "Permission denied", "runs/x"), "k3train: runs/x: Permission denied. Mend the path, its permissions or"),
        (OSError(28, "No space left on device", "a", None, "b"), "k3train: a and b: No space left on device. Mend the path"),
        (OSError(28, "No space left on device"), "k3train: a file: No space left on device. Mend the path"),
        (OSError("odd"), "k3train: odd"),
    ],
)
def test_errors_of_the_file_system_come_with_advice(error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys):
    def fail(_) -> None:
        raise error

    monkeypatch.setattr("launch.resume.run", fail)
    assert cli.main(["resume", "any"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(said) and captured.err.count("\n") == 1 and captured.out == ""
