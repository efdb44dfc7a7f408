"""Trains experiments by XLA's forms and by the kernels, from the same state on the same batches, and compares speed and losses.

    python benchmarks/kernels_in_training.py experiments/k3_100m.py --steps 100 --output docs/benchmarks/kernels_in_training_h200.json

A third run, by the kernels again, starts from parameters that are off by at most half a unit of bfloat16: how far its losses are
from the second one's is what rounding alone does. Fields after `--` are set in every experiment. Programs are compiled at once, before
the first one runs; nothing is saved or evaluated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WINDOW = 5  # steps between two readings of the clock
HALF_UNIT = 2.0**-9


def main() -> None:
    """Compiles, runs, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=100, help=f"updates of each run, at least {3 * WINDOW}")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments, fields = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, fields = arguments[:cut], arguments[cut + 1 :]
    options = parser.parse_args(arguments)
    if options.steps < 3 * WINDOW:
        parser.error(f"--steps {options.steps}: at least {3 * WINDOW}")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("pallas_kernels").setLevel(logging.INFO)  # which kernels were chosen

    with ThreadPoolExecutor() as threads:
        pending = [Compared(path, [*fields, "--schedule.steps", str(options.steps)], threads) for path in options.experiments]
        for compared in pending:
            compared.wait()
        rows = []
        for compared in pending:
            rows += compared.run(options.steps)
            if options.output:
                write(options.output, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows so far, with what they were measured on."""
    import jax

    from k3train.train.result import versions

    result = {"command": shlex.join(["python", *sys.argv]), "device": jax.devices()[0].device_kind, "versions": versions(), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Compared:
    """One experiment in both forms; compiling begins when it is made."""

    def __init__(self, path: Path, fields: list[str], threads: ThreadPoolExecutor):
        """Reads text and experiment, and hands the compilations to the threads."""
        from k3train.data.loader import open_data
        from k3train.train.assembly import assemble
        from launch import experiments

        self.path, self.experiment = path, experiments.resolve(path, fields, "kernels_in_training.py")
        self.data = open_data(self.experiment.data)
        self.assemblies, self.programs = {}, {}
        for kernels in ("xla", "auto"):
            assembly = assemble(dataclasses.replace(self.experiment, kernels=kernels), self.data.tokenizer.boundary_id)
            self.assemblies[kernels], self.programs[kernels] = assembly, threads.submit(compile_step, assembly)

    def wait(self) -> None:
        """Until its programs are compiled."""
        for kernels, program in self.programs.items():
            print(f"{self.path} {kernels}: compiled in {program.result()[1]:.0f} s", flush=True)

    def run(self, steps: int) -> list[dict[str, Any]]:
        """The rows of the three runs; prints each."""
        import jax
        import numpy as np

        put = self.assemblies["xla"].put
        batches = [put(self.data.train_batch(step)) for step in range(steps)]
        tokens = int(np.prod(batches[0].tokens.shape))
        rows = []
        for name, kernels in (("xla", "xla"), ("kernels", "auto"), ("kernels, perturbed", "auto")):
            program, seconds_to_compile = self.programs[kernels].result()
            state = self.assemblies["xla"].init()
            if name == "kernels, perturbed":
                state = state._replace(params=perturbed(state.params))
            losses, windows = [], []
            for step, batch in enumerate(batches):
                if step % WINDOW == 0:
                    jax.block_until_ready(state.params)
                    windows.append(time.perf_counter())
                state, metrics = program(state, batch)
                losses.append(metrics["loss"])
            del state
            losses = [round(float(loss), 5) for loss in losses]
            speeds = [WINDOW * tokens / (after - before) for before, after in zip(windows[1:], windows[2:], strict=False)]
            memory = program.memory_analysis()
            before = rows[-1]["losses"] if rows else losses
            apart = [abs(a - b) for a, b in zip(losses, before, strict=True)]
            rows.append(
                {
                    "experiment": str(self.path),
                    "run": name,
                    "compute": self.experiment.model.dtypes.compute,
                    "seconds_to_compile": round(seconds_to_compile, 1),
                    "tokens_per_second": round(statistics.median(speeds), 1),
                    "tokens_per_second_spread": [round(min(speeds), 1), round(max(speeds), 1)],
                    "temporary_bytes": memory.temp_size_in_bytes,
                    "mean_difference_to_row_before": sum(apart) / len(apart),
                    "largest_difference_to_row_before": max(apart),
                    "losses": losses,
                }
            )
            print(describe(rows[-1]), flush=True)
        return rows


def compile_step(assembly: Any) -> tuple[Any, float]:
    """The compiled train step and the seconds that it took, tracing included."""
    start = time.perf_counter()
    return assembly.train_step.lower(assembly.target, assembly.batch).compile(), time.perf_counter() - start


def perturbed(params: Any) -> Any:
    """Every parameter times 1 + noise of at most half a unit of bfloat16."""
    import jax

    @jax.jit
    def run(params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        return tree.unflatten(
            [x * (1 + jax.random.uniform(key, x.shape, x.dtype, -HALF_UNIT, HALF_UNIT)) for key, x in zip(keys, leaves, strict=True)]
        )

    return run(params)


def describe(row: dict[str, Any]) -> str:
    """A line for the person."""
    apart = f"losses {row['mean_difference_to_row_before']:.4f} from the line above (at most {row['largest_difference_to_row_before']:.4f})"
    course = f"loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}"
    speed = f"{row['tokens_per_second']:>11,.0f} tokens/s"
    memory = f"{row['temporary_bytes'] / 2**30:5.1f} GiB of temporaries"
    return f"{row['experiment']:26} {row['run']:18} {speed}, {memory}, {course}, {apart}, compiled in {row['seconds_to_compile']:.0f} s"


if __name__ == "__main__":
    main()
