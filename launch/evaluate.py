"""`k3train evaluate`: held-out loss and bits per byte of a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from k3train.config import Experiment, MeshConfig
from k3train.errors import UserError
from launch.models import not_finite
from launch.resume import saved_experiment

USAGE = "RUN [--step S] [--batches N] [--data.sources PATH ...] [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train evaluate`."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, as in runs/quickstart")
    parser.add_argument("--step", type=int, metavar="S", help="a saved step (default: the newest)")
    parser.add_argument("--batches", type=int, metavar="N", help="batches of held-out rows (default: the run's evaluation.batches)")
    parser.add_argument(
        "--data.sources",
        dest="sources",
        nargs="+",
        metavar="PATH",
        help="other text, of which the held-out share is scored",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Scores the checkpoint and prints the figures."""
    if options.batches is not None and options.batches < 1:
        raise UserError(f"--batches {options.batches}: must be at least 1")
    result = evaluate(saved_experiment(options.run_folder), options)
    if not result["text_of_the_run"] and options.sources is None:
        print(f"k3train: the text in {options.run_folder}'s data.sources has changed since step {result['step']}", file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{options.run_folder}, step {result['step']}: {result['heldout_bits_per_byte']:.4f} bits per byte,"
            f" loss {result['heldout_loss']:.4f} nats per token, on {result['bytes']:,} of {result['heldout_bytes']:,} held-out bytes"
        )


def evaluate(experiment: Experiment, options: argparse.Namespace) -> dict[str, Any]:
    """The figures, as training computes them, on all devices of this machine, whichever the run used.

    Raises:
        UserError: there is no such checkpoint, no text, or the loss is not finite.
    """
    from k3train.data.loader import open_data
    from k3train.train import compile_cache, evaluation, loop
    from k3train.train.assembly import assemble
    from k3train.train.checkpoints import Checkpoints

    sources = experiment.data.sources if options.sources is None else tuple(options.sources)
    experiment = dataclasses.replace(
        experiment,
        mesh=MeshConfig(),
        data=dataclasses.replace(experiment.data, sources=sources),
        optimizer=dataclasses.replace(experiment.optimizer, microbatches=1),
    ).validate()
    compile_cache.enable()
    with Checkpoints(options.run_folder / loop.CHECKPOINTS_FOLDER, experiment.model) as saves:
        record = saves.record(options.step)
        data = open_data(experiment.data)
        assembly = assemble(experiment, data.tokenizer.boundary_id)
        params = saves.restore_params(assembly.target.params, record.step)
    batches = list(data.heldout_batches(options.batches or experiment.evaluation.batches))
    heldout = evaluation.evaluate(assembly.eval_step, params, map(assembly.put, batches))
    if not math.isfinite(heldout.loss):
        raise not_finite(options.run_folder, experiment.model, params, "the loss is")
    return {
        "step": record.step,
        "heldout_loss": heldout.loss,
        "heldout_bits_per_byte": heldout.bits_per_byte,
        "batches": len(batches),
        "bytes": sum(data.count_bytes(batch) for batch in batches),
        "heldout_bytes": data.heldout_bytes,
        "text_of_the_run": data.fingerprint == record.data_fingerprint,
    }
