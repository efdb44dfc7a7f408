"""The steps of a run: updates, and between them metrics, evaluation and saves.

Nothing waits for the device on the way from one step to the next: a step's metrics are read once the next step is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax

from k3train import config_io
from k3train.config import Experiment
from k3train.data.batch import Batch
from k3train.errors import UserError
from k3train.train import evaluation, report, result
from k3train.train.checkpoints import Checkpoints, Record
from k3train.train.evaluation import Heldout, Sums
from k3train.train.metrics import MetricWriter
from k3train.train.progress import ProgressDisplay
from k3train.train.signals import StopRequest
from k3train.train.state import TrainState, Tree
from k3train.train.step import Metrics
from k3train.train.timing import Rate, Split


@dataclass(kw_only=True)
class Course:
    """A run under way: where it stands and what it works with."""

    experiment: Experiment
    data_fingerprint: str
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    eval_step: Callable[[], Callable[[Tree, Batch], Sums]]
    """Gives the step; waits for its compilation if need be."""
    heldout_batches: Callable[[], Iterator[Batch]]
    checkpoints: Checkpoints
    writer: MetricWriter
    display: ProgressDisplay
    stop: StopRequest

    state: TrainState
    step: int
    """Updates made: the state's own step, known without asking the device."""
    tokens: int
    """Targets trained on, up to the newest step whose metrics were read."""
    clock: Callable[[], float]
    """Wall time of the run in seconds, over all its resumes."""
    evaluated_step: int | None
    """Newest step with held-out figures in the metrics."""
    saved_step: int | None
    """Newest step that is saved."""
    mfu: Callable[[float], float | None]
    """Share of the devices' peak at a number of tokens per second; None where the peak is not known."""
    rate: Rate = field(default_factory=Rate)
    split: Split = field(default_factory=Split)
    unread: tuple[int, Metrics] | None = None
    """The newest step's metrics, not looked at yet."""

    def train(self, batches: Iterator[Batch]) -> None:
        """Makes steps until the schedule ends or someone asks to stop; `batches` begins with number `step`."""
        steps, evaluation_every = self.experiment.schedule.steps, self.experiment.evaluation.every_steps
        self.rate.restart()
        self.split.take()
        while self.step < steps and self.stop.signal is None:
            with self.split.part("data"):
                batch = next(batches)
            with self.split.part("dispatch"):
                self.state, step_metrics = self.train_step(self.state, batch)
            self.step += 1
            self.read_metrics()
            self.unread = (self.step, step_metrics)
            # An evaluation comes before the save of the same step, so that a resume from there finds its figures written.
            if self.step % evaluation_every == 0 or self.step == steps:
                self.evaluate()
            if self.checkpoints.due(self.step) or self.step == steps:
                self.save()
        self.read_metrics()

    def read_metrics(self) -> None:
        """Waits for the newest step of which the metrics are unread, shows and writes them.

        Raises:
          UserError: too many steps in a row had a loss or gradient that is not finite.
        """
        if self.unread is None:
            return
        (step, on_device), self.unread = self.unread, None
        with self.split.part("device"):
            values = jax.device_get(on_device)
        tokens, in_a_row = int(values.pop("tokens")), int(values.pop("skipped_in_a_row"))
        skipped, finite_L = bool(in_a_row), values.pop("finite", ())
        self.tokens += 0 if skipped else tokens
        self.rate.add(tokens)
        self.display.update(step, float(values["loss"]), self.rate.tokens_per_second, self.rate.seconds_per_step)
        if skipped:
            values["skipped"] = report.where_not_finite(values, finite_L, self.experiment.model)
            self.display.note(f"step {step}: loss or gradient not finite, first in {values['skipped']}. The step is left out.")
        logging, last = self.experiment.logging, self.experiment.schedule.steps
        if skipped or step == 1 or step % logging.every_steps == 0 or step == last:
            self.writer.write(step, {**values, **self.speed()})
        if in_a_row >= self.experiment.optimizer.max_skipped_steps:
            saved = f"The newest saved step is {self.saved_step}. " if self.saved_step else "No step is saved. "
            raise UserError(
                f"step {step}: {in_a_row} steps in a row had a loss or gradient that is not finite, the last one first in"
                f" {values['skipped']}. None of them was applied, and the run stops (optimizer.max_skipped_steps).\n"
                f"{saved}Look at the text, or go on from an earlier good step with a lower rate:\n"
                "  k3train resume RUN --step N --optimizer.peak-lr X --allow-changed learning-rate"
            )

    def speed(self) -> dict[str, float]:
        """What is written of the run's speed: seconds by part since the last line, rates, and the clock."""
        rate = self.rate.tokens_per_second
        mfu = self.mfu(rate)
        return {
            "tokens": self.tokens,
            "tokens_per_second": round(rate, 1),
            "seconds_per_step": round(self.rate.seconds_per_step, 6),
            **({} if mfu is None else {"mfu": round(mfu, 5)}),
            **{f"seconds/{name}": round(seconds, 4) for name, seconds in self.split.take().items()},
            "seconds": round(self.clock(), 3),
        }

    def evaluate(self) -> None:
        """Scores held-out text under the present parameters, unless that is done."""
        self.read_metrics()
        if self.evaluated_step == self.step:
            return
        with self.split.part("evaluation"):
            heldout: Heldout = evaluation.evaluate(self.eval_step(), self.state.params, self.heldout_batches())
        self.writer.write(self.step, {"heldout_loss": heldout.loss, "heldout_bits_per_byte": heldout.bits_per_byte})
        self.display.note(f"step {self.step}: held-out text {heldout.bits_per_byte:.3f} bits per byte")
        self.evaluated_step = self.step
        self.rate.restart()

    def save(self) -> None:
        """Starts to save the present state, unless that is done."""
        self.read_metrics()
        if self.saved_step == self.step:
            return
        record = Record(
            step=self.step,
            seconds=self.clock(),
            tokens=self.tokens,
            data_fingerprint=self.data_fingerprint,
            experiment=config_io.to_dict(self.experiment),
            versions=result.versions(),
        )
        with self.split.part("save"):
            self.checkpoints.save(self.state, record)
        self.saved_step = self.step
        self.rate.restart()


def wall_clock(start: float, before: float = 0.0) -> Callable[[], float]:
    """Seconds since `start` (of `time.monotonic`), plus those of earlier parts of the run."""
    return lambda: before + time.monotonic() - start
