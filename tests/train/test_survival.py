"""What a run survives: kill -9 at any moment, also inside a save; and what it says when a save cannot be written."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train import config_io
from k3train.config import CheckpointConfig, Experiment, ModelConfig
from k3train.errors import UserError
from k3train.train import metrics, step_folders
from k3train.train.checkpoints import Checkpoints
from tests.train.saves import example_state, record

REPOSITORY = Path(__file__).resolve().parents[2]
SAVE_ALL = CheckpointConfig(every_steps=1, keep=9)

# A run of the real saves and metrics around a step that is cheap to compile: it starts in seconds, so that it can be killed often.
SMALL_RUN = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from k3train.config import CheckpointConfig, ModelConfig
from k3train.train.checkpoints import Checkpoints
from k3train.train.metrics import JsonLines
from k3train import config_io
from tests.train.saves import example_state, record, target
folder, model, steps = Path(sys.argv[1]), config_io.from_dict(ModelConfig, json.loads(sys.argv[2])), int(sys.argv[3])

@jax.jit
def update(state):
    params = jax.tree.map(lambda w: w - 0.01 * jnp.sin(w * (1 + state.step)), state.params)
    return state._replace(step=state.step + 1, params=params), sum(jnp.sum(jnp.cos(w)) for w in jax.tree.leaves(params))

start, saves = 0, folder / "checkpoints"
if saves.is_dir() and any(path.name.isdigit() for path in saves.iterdir()):
    with Checkpoints(saves, model) as reading:
        start = reading.record().step
with Checkpoints(saves, model, CheckpointConfig(every_steps=2, keep=2)) as checkpoints:
    state = checkpoints.restore(target(model), start) if start else example_state(0, model)
    with JsonLines(folder / "metrics.jsonl", resume_step=start) as writer:
        for step in range(start + 1, steps + 1):
            state, loss = update(state)
            writer.write(step, {"loss": loss})
            if checkpoints.due(step):
                checkpoints.save(state, record(step))
"""


def start(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as output:
        return subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, stdout=output, stderr=output)


def killed(process: subprocess.Popen, moment: Callable[[], bool]) -> bool:
    """Waits for the moment and kills; False if the process had ended before."""
    while not moment():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    process.kill()
    return process.wait() == -signal.SIGKILL


def inside_a_save(saves: Path) -> bool:
    return saves.is_dir() and any(step_folders.SAVING in path.name for path in saves.iterdir())


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics.read(folder / "metrics.jsonl") if "loss" in line]


def test_killed_runs_repeat_the_uninterrupted_one(tmp_path: Path, tiny_model: ModelConfig):
    """Twice inside a save and once between two."""
    steps, model = 40, json.dumps(config_io.to_dict(tiny_model))

    def run(name: str) -> subprocess.Popen:
        (tmp_path / name).mkdir(exist_ok=True)
        return start(["-c", SMALL_RUN, str(tmp_path / name), model, str(steps)], tmp_path / "log.txt")

    whole = run("whole")
    cut, saves = tmp_path / "cut", tmp_path / "cut" / "checkpoints"
    for kill in range(3):
        process, before = run("cut"), len(step_folders.whole(saves)) and step_folders.whole(saves)[-1]

        def moment(before: int = before, inside: bool = kill != 1) -> bool:
            newest = step_folders.whole(saves)[-1:] or [0]
            return newest[0] > before + 4 and inside_a_save(saves) == inside

        assert killed(process, moment), (tmp_path / "log.txt").read_text()
        assert len(losses(cut)) < steps
    assert run("cut").wait(120) == 0 and whole.wait(120) == 0, (tmp_path / "log.txt").read_text()
    assert len(losses(cut)) == steps and losses(cut) == losses(tmp_path / "whole")
    assert step_folders.whole(saves) == [38, 40]
    assert all(path.name.isdigit() for path in saves.iterdir())


@pytest.mark.slow
def test_twenty_kills_of_a_whole_run(tmp_path: Path, experiment: Experiment):
    """`k3train train`, then `k3train resume` after every kill -9; odd ones hit a save, even ones a random moment."""
    source = tmp_path / "tiny.py"
    source.write_text(
        "from k3train import config_io\nfrom k3train.config import Experiment\nimport json\n"
        f"def experiment():\n    return config_io.from_dict(Experiment, json.loads({json.dumps(config_io.to_dict(experiment))!r}))\n"
    )
    options = ["--schedule.steps", "200", "--runs-folder", str(tmp_path), "--evaluation.every-steps", "50", "--checkpoint.keep", "3"]
    log, cut, dice = tmp_path / "log.txt", tmp_path / "cut", random.Random(0)
    command = ["-m", "launch.cli", "train", str(source), *options]
    assert start([*command, "--name", "whole", "--checkpoint.every-steps", "200"], log).wait(600) == 0, log.read_text()
    arguments = [*command, "--name", "cut", "--checkpoint.every-steps", "1"]
    inside = 0
    for kill in range(20):
        process = start(arguments, log)
        newest = (step_folders.whole(cut / "checkpoints")[-1:] or [0])[0]
        later = time.monotonic() + 1e9

        def moment(newest: int = newest, hit_save: bool = kill % 2 == 1, wait: float = dice.uniform(0.0, 1.0)) -> bool:
            nonlocal later
            saves = cut / "checkpoints"
            if not saves.is_dir() or (step_folders.whole(saves)[-1:] or [0])[0] <= newest:
                return False
            later = min(later, time.monotonic() + wait)
            return time.monotonic() >= later and (not hit_save or inside_a_save(saves))

        assert killed(process, moment), log.read_text()[-3000:]
        inside += inside_a_save(cut / "checkpoints")
        arguments = ["-m", "launch.cli", "resume", str(cut)]
    assert start([*arguments, "--checkpoint.every-steps", "100"], log).wait(600) == 0, log.read_text()[-3000:]
    assert inside >= 5
    assert losses(cut) == losses(tmp_path / "whole") and len(losses(cut)) == 200


def fails(folder: Path, model: ModelConfig, spoil: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> str:
    """Saves step 1, spoils the place, and saves on; the one message that comes, within seconds and with nothing else on the terminal."""
    state = example_state(1, model)
    capfd.readouterr()
    with pytest.raises(UserError) as error, Checkpoints(folder, model, SAVE_ALL) as checkpoints:
        checkpoints.save(state, record(1))
        checkpoints.wait()
        spoil()
        begin = time.monotonic()
        for step in range(2, 200):
            if checkpoints.due(step):
                checkpoints.save(state, record(step))
    assert time.monotonic() - begin < 30.0
    time.sleep(0.5)  # what threads still print
    output = capfd.readouterr()
    assert output.err == "" and output.out == ""
    return str(error.value)


@pytest.fixture
def full_disk(tmp_path: Path):
    """A disk of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("may not mount a file system here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(full_disk: Path, tiny_model: ModelConfig, capfd: pytest.CaptureFixture[str]):
    folder = full_disk / "run" / "checkpoints"
    said = fails(folder, tiny_model, lambda: None, capfd)
    whole = step_folders.whole(folder)
    assert "could not be saved (No space left on device)" in said
    assert f"The newest whole step is {whole[-1]}." in said and f"k3train resume {folder.parent}" in said
    with Checkpoints(folder, tiny_model) as checkpoints:
        checkpoints.check()


def test_a_folder_that_takes_no_more(tmp_path: Path, tiny_model: ModelConfig, capfd: pytest.CaptureFixture[str]):
    """Root writes whatever the modes say, so the folder is made immutable; where that cannot be done, it is put away."""
    folder = tmp_path / "run" / "checkpoints"

    def spoil() -> None:
        if subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
            folder.rename(folder.with_name("away"))
            folder.write_text("in the way")

    try:
        said = fails(folder, tiny_model, spoil, capfd)
    finally:
        subprocess.run(["chattr", "-i", folder], capture_output=True)
    assert "step 2 could not be saved (" in said and "permissions" in said


def test_files_that_may_not_grow(tmp_path: Path, tiny_model: ModelConfig, capfd: pytest.CaptureFixture[str]):
    """Many writes fail at once, some of them after the error is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        said = fails(tmp_path / "c", tiny_model, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)), capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "step 2 could not be saved (File too large)" in said and "newest whole step is 1" in said


def test_a_disk_that_fails_elsewhere_is_told_with_the_newest_step(tmp_path: Path, tiny_model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    """On a full disk, a line of the metrics may be the first thing that finds no room."""
    state, full = example_state(1, tiny_model), OSError(28, os.strerror(28), "metrics.jsonl")
    with pytest.raises(UserError, match="metrics.jsonl: No space left on device.\nThe newest whole step is 1. Make room"):
        with Checkpoints(tmp_path / "c", tiny_model, SAVE_ALL) as checkpoints:
            checkpoints.save(state, record(1))
            raise full
    monkeypatch.setattr("k3train.train.manifest.write", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match="step 2 could not be saved .No space left on device.*\nThe newest whole step is 1"):
        with Checkpoints(tmp_path / "c", tiny_model, SAVE_ALL) as checkpoints:
            checkpoints.save(state, record(2))
            raise full


def test_an_error_that_is_none_of_the_disk_passes(tmp_path: Path, tiny_model: ModelConfig):
    for error in (BrokenPipeError(32, os.strerror(32)), KeyboardInterrupt()):
        with pytest.raises(type(error)), Checkpoints(tmp_path / "c", tiny_model, SAVE_ALL):
            raise error


def test_nothing_saved_yet_is_no_reason_to_resume(tmp_path: Path, tiny_model: ModelConfig):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(UserError) as error:
        Checkpoints(tmp_path / "run" / "checkpoints", tiny_model, SAVE_ALL)
    assert "No step is saved yet" in str(error.value) and "resume" not in str(error.value)


def test_a_save_that_failed_is_told_at_the_next_step(tmp_path: Path, tiny_model: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    def fail(*_) -> None:
        raise OSError(28, os.strerror(28), "somewhere")

    monkeypatch.setattr("k3train.train.manifest.write", fail)
    with Checkpoints(tmp_path / "c", tiny_model, CheckpointConfig(every_steps=100)) as checkpoints:
        checkpoints.save(example_state(1, tiny_model), record(1))
        deadline = time.monotonic() + 30.0
        with pytest.raises(UserError, match="step 1 could not be saved .No space left on device"):
            while time.monotonic() < deadline:
                checkpoints.due(3)
                time.sleep(0.01)
    assert step_folders.whole(tmp_path / "c") == []


def test_metrics_that_a_crash_tore_are_left_out(tmp_path: Path):
    """A line cut off in the middle, bytes that are no text, JSON that is no line of ours."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.1}\n\xff\xfe\x00{"step": 2}\n[3]\n{"step": "4"}\n\n{"step": 5, "loss": 0.5}\n{"step": 6, "lo')
    assert metrics.read(path) == [{"step": 1, "loss": 0.1}, {"step": 5, "loss": 0.5}]
    with metrics.JsonLines(path, resume_step=4) as writer:
        writer.write(5, {"loss": 0.25})
    assert metrics.read(path) == [{"step": 1, "loss": 0.1}, {"step": 5, "loss": 0.25}]
