"""Trains experiments as they are and writes down speed, memory and the course of the loss.

    python benchmarks/training.py experiments/quickstart.py experiments/k3_100m.py --output docs/benchmarks/training_h200.json

Each experiment runs in a process of its own, into a folder that is thrown away; fields after `--` are set in all of them, as in
`-- --schedule.steps 400`. Tokens per second are the median over the lines after the first tenth of the run, evaluation and saves left out.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Runs every experiment and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments, fields = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, fields = arguments[:cut], arguments[cut + 1 :]
    options = parser.parse_args(arguments)
    if options.in_this_process:
        print(json.dumps(measure(options.experiments[0], fields)))
        return
    rows = []
    for path in options.experiments:
        command = [sys.executable, __file__, str(path), "--in-this-process", "--", *fields]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(describe(rows[-1]), flush=True)
    if options.output:
        result = {"command": shlex.join(["python", *sys.argv]), "rows": rows}
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(path: Path, fields: list[str]) -> dict[str, Any]:
    """One whole run in a temporary folder; what it shows on the way goes to the standard error stream."""
    import jax
    from rich.console import Console

    from k3train.train import loop, metrics
    from k3train.train.result import versions
    from launch import experiments

    experiment = experiments.resolve(path, fields, "training.py")
    with tempfile.TemporaryDirectory() as folder:
        outcome = loop.run(experiment, Path(folder), console=Console(stderr=True))
        lines = [line for line in metrics.read(Path(folder) / loop.METRICS_FILE) if "loss" in line]
    settled = [line for line in lines if line["step"] > outcome.steps / 10]
    marks = [outcome.steps * part / 10 for part in range(11)]  # not every step has a line
    shown = {line["step"]: line["loss"] for line in (min(lines, key=lambda line: abs(line["step"] - mark)) for mark in marks)}
    rates = [line["tokens_per_second"] for line in settled]
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return {
        "experiment": str(path),
        "fields": fields,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "parameters": outcome.parameters,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_spread": [min(rates), max(rates)],
        "mfu": statistics.median(line["mfu"] for line in settled) if "mfu" in settled[-1] else None,
        "peak_memory_bytes": memory.get("peak_bytes_in_use"),
        "loss": {step: None if loss is None else round(loss, 4) for step, loss in shown.items()},
        "expert_load_max_over_mean": max((max(line["expert_load_max_over_mean"]) for line in lines if line["step"] >= 50), default=None),
        "heldout_bits_per_byte": outcome.heldout_bits_per_byte,
        "versions": versions(),
    }


def describe(row: dict[str, Any]) -> str:
    """A line for the person."""
    memory = row["peak_memory_bytes"]
    losses = list(row["loss"].values())

    def shown(value: float | None) -> str:
        return "not finite" if value is None or not math.isfinite(value) else f"{value:.3f}"

    figures = [
        f"{row['parameters'] / 1e6:.1f} M parameters on {row['devices']} x {row['device']}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        *([f"MFU {100 * row['mfu']:.1f} %"] if row["mfu"] else []),
        *([f"{memory / 2**30:.1f} GiB"] if memory else []),
        f"loss {shown(losses[0])} -> {shown(losses[-1])}",
        f"held out {shown(row['heldout_bits_per_byte'])} bits per byte",
    ]
    return f"{row['experiment']}: " + ", ".join(figures)


if __name__ == "__main__":
    main()
