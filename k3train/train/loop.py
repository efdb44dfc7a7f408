"""A run from its config to its result: what is set up, in which order, and what is left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from rich.console import Console

from k3train.config import Experiment
from k3train.data.counting import counting_baselines
from k3train.data.loader import Data, open_data
from k3train.errors import UserError
from k3train.models import flops, stacks
from k3train.train import compile_cache, determinism, device_peaks, metrics, result
from k3train.train.assembly import Assembly, assemble
from k3train.train.checkpoints import Checkpoints, Record
from k3train.train.course import Course, wall_clock
from k3train.train.progress import ProgressDisplay
from k3train.train.result import Result
from k3train.train.resume import Change, Resume, adopt, check_resumable, describe
from k3train.train.run_folder import (
    CHECKPOINTS_FOLDER,
    LOSS_CURVE_FILE,
    METRICS_FILE,
    RESULT_FILE,
    TENSORBOARD_FOLDER,
    alone,
    refuse_existing_run,
)
from k3train.train.sample import sample
from k3train.train.signals import Stopped, StopRequest
from k3train.train.state import TrainState, Tree, count
from k3train.train.tensorboard import TensorBoard

COUNTABLE_BYTES = 100_000_000
"""Longest training text whose byte counts are worth their memory beside a run."""


def run(experiment: Experiment, run_folder: Path, *, resume: Resume | None = None, console: Console | None = None) -> Result:
    """Trains until `schedule.steps` updates are made and writes everything into the run folder.

    The folder gets `metrics.jsonl`, `checkpoints/`, and at the end `result.json` and `loss_curve.png`. With `resume` the run goes on
    from its newest checkpoint, exactly as if it had never stopped; a finished run is left as it is.

    Raises:
      UserError: the config, the data, the mesh or the run folder do not allow the run. Nothing was overwritten.
      Stopped: SIGINT or SIGTERM came, and the state is saved. A `SystemExit` with code 130 or 143.
    """
    start = time.monotonic()
    console = console or Console()
    experiment.validate()
    record = _record(experiment, run_folder, resume.step) if resume else None
    changes: list[Change] = []
    if record is None:
        refuse_existing_run(run_folder)
    elif resume is not None and record.step >= experiment.schedule.steps and (run_folder / RESULT_FILE).is_file():
        check_resumable(record, experiment, record.data_fingerprint, run_folder, resume.allow)  # a change that is refused is told here too
        console.print(f"{run_folder} is finished: all {record.step} steps are made.", highlight=False)
        return Result.load(run_folder / RESULT_FILE)
    determinism.prepare(experiment, run_folder)
    compile_cache.enable()

    def announce(_: int) -> None:
        console.print("Stopping as soon as this step is finished and saved. Ask again to stop at once.", highlight=False)

    with alone(run_folder), StopRequest(announce) as stop:
        data = open_data(experiment.data)
        _check_vocabulary(experiment, data)
        if resume is not None and record is not None:
            changes = check_resumable(record, experiment, data.fingerprint, run_folder, resume.allow)
            if changes:
                console.print(f"Changed: {describe(changes)}", highlight=False, markup=False, soft_wrap=True)
        assembly = assemble(experiment, data.tokenizer.boundary_id)
        return _train(experiment, run_folder, record, changes, data, assembly, stop, console, start)


def _train(
    experiment: Experiment,
    run_folder: Path,
    record: Record | None,
    changes: list[Change],
    data: Data,
    assembly: Assembly,
    stop: StopRequest,
    console: Console,
    start: float,
) -> Result:
    """Compiles, makes or restores the state, trains, and writes what is left behind."""
    step = record.step if record else 0
    parameters, lines = count(assembly.target.params), run_folder / METRICS_FILE
    console.print(
        f"{'Resuming' if record else 'Starting'} {run_folder} at step {step} of {experiment.schedule.steps}: {parameters:,} parameters, "
        f"{data.train_bytes:,} bytes of text and {data.heldout_bytes:,} held out. Compiling comes first.",
        highlight=False,
        soft_wrap=True,
    )
    # Compiling leaves the interpreter alone (tracing, inside `lower`, does not), so the state and the counting models are made meanwhile.
    with (
        Checkpoints(run_folder / CHECKPOINTS_FOLDER, experiment.model, experiment.checkpoint) as checkpoints,
        _writer(experiment, run_folder, step) as writer,
        ProgressDisplay(console, step, experiment.schedule.steps) as display,
        _threads() as background,
    ):
        train_step = background.submit(assembly.train_step.lower(assembly.target, assembly.batch).compile)
        baselines = background.submit(_baselines, data)
        eval_step = background.submit(assembly.eval_step.lower(assembly.target.params, assembly.batch).compile)
        course = Course(
            experiment=experiment,
            data_fingerprint=data.fingerprint,
            state=_restored(checkpoints, assembly.target, step, changes, experiment) if record else assembly.init(),
            train_step=train_step.result(),
            eval_step=eval_step.result,
            heldout_batches=lambda: map(assembly.put, data.heldout_batches(experiment.evaluation.batches)),
            checkpoints=checkpoints,
            writer=writer,
            display=display,
            stop=stop,
            step=step,
            tokens=record.tokens if record else 0,
            clock=wall_clock(start, record.seconds if record else 0.0),
            evaluated_step=metrics.last_step_with("heldout_loss", lines, up_to=step),
            saved_step=record.step if record else None,
            mfu=_mfu(experiment, assembly.target.params),
        )
        course.train(map(assembly.put, data.train_iterator(step)))
        if course.step < experiment.schedule.steps and stop.signal is not None:
            course.save()
            checkpoints.wait()
            display.note(f"Stopped after step {course.step}, which is saved. To go on:\n  k3train resume {run_folder}")
            raise Stopped(stop.signal)
        course.evaluate()
        course.save()
        checkpoints.wait()
        counted = baselines.result()
        continuation = sample(experiment.evaluation, experiment.model, course.state.params, data.tokenizer)
    return _finish(experiment, run_folder, course, parameters, counted, continuation, console)


def _finish(
    experiment: Experiment,
    run_folder: Path,
    course: Course,
    parameters: int,
    baselines: dict[str, float],
    continuation: str | None,
    console: Console,
) -> Result:
    """Writes and shows the result."""
    lines = metrics.read(run_folder / METRICS_FILE)
    heldout = next(line for line in reversed(lines) if "heldout_loss" in line)
    result.draw_loss_curve(lines, baselines, run_folder / LOSS_CURVE_FILE)
    outcome = Result(
        name=experiment.name,
        heldout_bits_per_byte=heldout["heldout_bits_per_byte"],
        heldout_loss=heldout["heldout_loss"],
        baselines=baselines,
        seconds=round(course.clock(), 3),
        tokens=course.tokens,
        steps=course.step,
        parameters=parameters,
        versions=result.versions(),
    )
    outcome.save(run_folder / RESULT_FILE)
    if continuation is not None:
        console.print("The model continues a text:", highlight=False)
        console.print(f"{continuation}\n", highlight=False, markup=False)
    result.print_table(outcome, console)
    written = ", ".join((RESULT_FILE, LOSS_CURVE_FILE, METRICS_FILE, CHECKPOINTS_FOLDER))
    console.print(f"Everything is in {run_folder}: {written}.", highlight=False, soft_wrap=True)
    return outcome


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Two threads; an error does not wait for what they are at."""
    threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="set-up")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _writer(experiment: Experiment, run_folder: Path, step: int) -> Iterator[metrics.MetricWriter]:
    """Where the run's figures go: JSON lines always, TensorBoard if the config says so."""
    with contextlib.ExitStack() as stack:
        writers: list[metrics.MetricWriter] = [stack.enter_context(metrics.JsonLines(run_folder / METRICS_FILE, resume_step=step))]
        if experiment.logging.tensorboard:
            writers.append(stack.enter_context(TensorBoard(run_folder / TENSORBOARD_FOLDER, resume_step=step)))
        yield metrics.All(writers)


def _mfu(experiment: Experiment, params: Tree) -> Callable[[float], float | None]:
    """Model FLOPs utilisation at a number of tokens per second; a rate is stated for BF16 work alone."""
    model = experiment.model
    by_part = flops.parts(stacks.unstack(params, model), model, experiment.data.sequence_length)
    per_token = flops.training_flops(flops.whole(by_part).forward_flops)
    if model.dtypes.compute != "bfloat16":
        return lambda tokens_per_second: None
    return lambda tokens_per_second: device_peaks.mfu(tokens_per_second, per_token, jax.devices())


def _record(experiment: Experiment, run_folder: Path, step: int | None) -> Record:
    """Of the step to go on from, whose files are whole."""
    with Checkpoints(run_folder / CHECKPOINTS_FOLDER, experiment.model) as checkpoints:
        record = checkpoints.record(step)
        checkpoints.check(record.step)
        return record


def _restored(checkpoints: Checkpoints, target: TrainState, step: int, changes: list[Change], experiment: Experiment) -> TrainState:
    """The saved state; from here on the run is `experiment`."""
    state = checkpoints.restore(target, step, checked=True)
    if step < experiment.schedule.steps:  # the end comes anew, and what it writes
        (checkpoints.folder.parent / RESULT_FILE).unlink(missing_ok=True)
    adopt(changes, experiment, checkpoints.folder.parent, step)
    return state


def _check_vocabulary(experiment: Experiment, data: Data) -> None:
    if data.tokenizer.vocab_size > experiment.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {experiment.model.vocab_size} is too small: the tokenizer has {data.tokenizer.vocab_size} tokens. "
            f"Set it to {data.tokenizer.vocab_size} or more."
        )


def _baselines(data: Data) -> dict[str, float]:
    return counting_baselines(data.train_text, data.heldout_text) if data.train_bytes <= COUNTABLE_BYTES else {}
