"""Whole runs of a tiny model: resume, stop, evaluation, what is written and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from rich.console import Console

from k3train.config import CheckpointConfig, DataConfig, DtypePolicy, Experiment, LoggingConfig, MeshConfig, ScheduleConfig
from k3train.data.loader import open_data
from k3train.errors import UserError
from k3train.train import assembly, course, loop, metrics
from k3train.train.checkpoints import Checkpoints
from k3train.train.resume import Resume
from k3train.train.run_folder import alone, way_on
from k3train.train.signals import Stopped
from k3train.train.timing import Rate, Split

STEPS = 6


@functools.cache
def assembled(experiment: Experiment, boundary_id: int) -> assembly.Assembly:
    return assembly.assemble(experiment, boundary_id)


@pytest.fixture(autouse=True)
def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing the model takes longer than a run: runs that differ only in where and how often they write share it."""

    def assemble(experiment: Experiment, boundary_id: int) -> assembly.Assembly:
        elsewhere = {"name": "run", "runs_folder": "runs", "checkpoint": CheckpointConfig(), "logging": LoggingConfig()}
        return assembled(dataclasses.replace(experiment, **elsewhere), boundary_id)

    monkeypatch.setattr(loop, "assemble", assemble)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def go(experiment: Experiment, folder: Path, resume: bool = False):
    console = quiet()
    return loop.run(experiment, folder, resume=Resume() if resume else None, console=console), console.file.getvalue()


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics.read(folder / loop.METRICS_FILE) if "loss" in line]


def heldout(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["heldout_loss"]) for line in metrics.read(folder / loop.METRICS_FILE) if "heldout_loss" in line]


@pytest.fixture(scope="module")
def whole(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, with every step saved. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    folder.mkdir()
    outcome, text = go(experiment, folder)
    (folder / "said.txt").write_text(text)
    (folder / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
    return folder


def cut_after(step: int, whole: Path, folder: Path) -> Path:
    """A copy of the run as a crash would leave it: saves up to `step`, metrics a little further."""
    shutil.copytree(whole, folder)
    for name in (loop.RESULT_FILE, loop.LOSS_CURVE_FILE):
        (folder / name).unlink()
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / loop.CHECKPOINTS_FOLDER / str(later))
    lines = [line for line in metrics.read(folder / loop.METRICS_FILE) if line["step"] <= step + 1]
    (folder / loop.METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_leaves_everything_behind(whole: Path, experiment: Experiment):
    outcome, said = json.loads((whole / "outcome.json").read_text()), (whole / "said.txt").read_text()
    assert json.loads((whole / loop.RESULT_FILE).read_text()) == outcome
    assert [step for step, _ in losses(whole)] == list(range(1, STEPS + 1))
    assert any((whole / loop.TENSORBOARD_FOLDER).iterdir())
    assert [step for step, _ in heldout(whole)] == [4, 6]
    assert outcome["steps"] == STEPS and outcome["parameters"] > 10_000 and outcome["seconds"] > 0
    assert outcome["heldout_loss"] == heldout(whole)[-1][1]
    assert set(outcome["baselines"]) == {"order_1", "order_2", "order_3"}
    assert (whole / loop.LOSS_CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    data = open_data(experiment.data)
    assert outcome["tokens"] == sum(int(data.train_batch(step).loss_mask.sum()) for step in range(STEPS))
    assert f"step {STEPS}/{STEPS}" in said and "counts of order 2" in said and f"{outcome['heldout_bits_per_byte']:.3f}" in said
    line = metrics.read(whole / loop.METRICS_FILE)[0]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "seconds", "expert_load_max_over_mean"} <= set(line)
    assert len(line["expert_load_max_over_mean"]) == 1


@pytest.mark.numerics
@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(step: int, whole: Path, experiment: Experiment, tmp_path: Path):
    folder = cut_after(step, whole, tmp_path / "cut")
    outcome, _ = go(experiment, folder, resume=True)
    assert losses(folder) == losses(whole)
    assert heldout(folder) == heldout(whole)
    assert outcome.tokens == json.loads((whole / "outcome.json").read_text())["tokens"]
    assert outcome.seconds > json.loads((whole / "outcome.json").read_text())["seconds"] / 2
    target = assembled_target(experiment)
    states = []
    for run in (whole, folder):
        with Checkpoints(run / loop.CHECKPOINTS_FOLDER, experiment.model) as checkpoints:
            states.append(checkpoints.restore(target))
    jax.tree.map(np.testing.assert_array_equal, *states)


def assembled_target(experiment: Experiment):
    return loop.assemble(experiment, 256).target


def test_a_finished_run_is_left_as_it_is(whole: Path, experiment: Experiment):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    outcome, said = go(experiment, whole, resume=True)
    assert dataclasses.asdict(outcome) == json.loads((whole / "outcome.json").read_text())
    assert "finished" in said
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


def test_a_run_that_ended_before_its_result_gets_one(whole: Path, experiment: Experiment, tmp_path: Path):
    folder = cut_after(STEPS, whole, tmp_path / "cut")
    go(experiment, folder, resume=True)
    assert (folder / loop.RESULT_FILE).is_file()
    assert losses(folder) == losses(whole) and heldout(folder) == heldout(whole)


def test_heldout_figures_equal_a_direct_computation(whole: Path, experiment: Experiment):
    """In float64, from the saved parameters' logits."""
    from flax import nnx

    from k3train.models import parameters
    from k3train.models.layout import LocalLayout

    with Checkpoints(whole / loop.CHECKPOINTS_FOLDER, experiment.model) as checkpoints:
        params = checkpoints.restore_params(assembled_target(experiment).params)
    decoder = nnx.merge(parameters.abstract(experiment.model)[0], params)
    run = jax.jit(lambda tokens, segments: decoder(tokens, segments, layout=LocalLayout()).logits_BTV)
    nats, targets, text = 0.0, 0, 0
    for batch in open_data(experiment.data).heldout_batches(experiment.evaluation.batches):
        logits = np.asarray(run(batch.tokens, batch.segment_ids), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        real = batch.loss_mask > 0
        nats -= np.take_along_axis(log_p, batch.targets[..., None], -1)[..., 0][real].sum()
        targets, text = targets + int(real.sum()), text + int((batch.targets[real] < 256).sum())
    outcome = json.loads((whole / "outcome.json").read_text())
    assert targets > text > 0
    assert outcome["heldout_loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert outcome["heldout_bits_per_byte"] == pytest.approx(nats / text / math.log(2), rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_and_the_run_goes_on(
    number: signal.Signals, whole: Path, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The signal comes while step 3 is under way; nothing but that asks for a save there."""
    experiment = dataclasses.replace(experiment, checkpoint=CheckpointConfig(every_steps=100))
    read = course.Course.read_metrics

    def read_and_kill(self: course.Course) -> None:
        if self.step == 3 and self.stop.signal is None:
            os.kill(os.getpid(), number)
            while self.stop.signal is None:
                pass
        read(self)

    monkeypatch.setattr(course.Course, "read_metrics", read_and_kill)
    folder, console = tmp_path / "stopped", quiet()
    folder.mkdir()
    with pytest.raises(Stopped) as stopped:
        loop.run(experiment, folder, console=console)
    assert stopped.value.code == 128 + number
    assert f"k3train resume {folder}" in console.file.getvalue().replace("\n", "")
    with Checkpoints(folder / loop.CHECKPOINTS_FOLDER, experiment.model) as checkpoints:
        assert checkpoints.steps() == [3]
    assert losses(folder) == losses(whole)[:3]
    monkeypatch.undo()
    go(experiment, folder, resume=True)
    assert losses(folder) == losses(whole)


def test_an_existing_run_is_not_overwritten(whole: Path, experiment: Experiment):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(UserError, match="already holds a run"):
        go(experiment, whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_nothing_is_written_before_the_input_is_found_good(experiment: Experiment, tmp_path: Path):
    small = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, vocab_size=256))
    with pytest.raises(UserError, match="model.vocab_size = 256 is too small: the tokenizer has 257 tokens"):
        go(small, tmp_path)
    with pytest.raises(UserError, match="devices"):
        go(dataclasses.replace(experiment, mesh=MeshConfig(replica=4, fsdp=16), data=DataConfig(batch_size=64)), tmp_path)
    with pytest.raises(UserError, match="no checkpoint here"):
        go(experiment, tmp_path, resume=True)
    with pytest.raises(UserError, match="schedule.steps = 0"):
        go(dataclasses.replace(experiment, schedule=ScheduleConfig(steps=0)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_steps_that_are_not_finite_are_named_and_too_many_in_a_row_end_the_run(experiment: Experiment):
    """Two are written down and passed over; the third, the limit, ends the run unsaved."""
    written: dict[int, dict] = {}
    said: list[str] = []
    limit = dataclasses.replace(experiment.optimizer, max_skipped_steps=3)
    run = SimpleNamespace(
        experiment=dataclasses.replace(experiment, optimizer=limit, logging=LoggingConfig(every_steps=100)),
        split=Split(),
        rate=Rate(),
        tokens=50,
        saved_step=2,
        display=SimpleNamespace(update=lambda *_: None, note=said.append),
        writer=SimpleNamespace(write=lambda step, values: written.update({step: values})),
        speed=lambda: {},
    )
    bad = {"loss": np.float32("nan"), "grad_norm": np.float32("nan"), "tokens": 7.0, "finite": np.array([True, False])}
    for step in (3, 4):
        run.unread = (step, {**bad, "skipped_in_a_row": step - 2})
        course.Course.read_metrics(cast(course.Course, run))
    run.unread = (5, {**bad, "skipped_in_a_row": 3})
    place = "layer 1 \\(gated_mla, latent_moe\\), in the forward pass"
    with pytest.raises(UserError, match=f"step 5: 3 steps in a row.*{place}.*\n.*newest saved step is 2"):
        course.Course.read_metrics(cast(course.Course, run))
    assert sorted(written) == [3, 4, 5] and all("layer 1" in values["skipped"] for values in written.values())
    assert len(said) == 3 and "step 3: loss or gradient not finite" in said[0]
    assert run.tokens == 50  # nothing was learnt from them


def test_one_process_at_a_time(experiment: Experiment, tmp_path: Path):
    with alone(tmp_path), pytest.raises(UserError, match="another process is training here"):
        loop.run(experiment, tmp_path, console=Console(file=io.StringIO()))


def test_a_run_under_way_is_not_taken_for_one_that_was_cut_off(tmp_path: Path):
    with alone(tmp_path), pytest.raises(UserError, match="another process is training here"):
        way_on(tmp_path)
    assert "cut off before its first save" in way_on(tmp_path)


def test_a_finished_run_refuses_what_an_unfinished_one_would(whole: Path, experiment: Experiment):
    deeper = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, norm_eps=1e-3))
    with pytest.raises(UserError, match="model.norm_eps"):
        go(deeper, whole, resume=True)


def test_a_run_cut_off_before_its_first_save_names_the_way_out(experiment: Experiment, tmp_path: Path):
    (tmp_path / loop.METRICS_FILE).write_text("")
    with pytest.raises(UserError, match=f"mv {tmp_path}"):
        loop.run(experiment, tmp_path, console=Console(file=io.StringIO()))


def test_float64_needs_its_switch(experiment: Experiment, tmp_path: Path):
    wide = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, dtypes=DtypePolicy(compute="float64")))
    with pytest.raises(UserError, match="JAX_ENABLE_X64"):
        loop.run(wide, tmp_path, console=Console(file=io.StringIO()))
