"""Where the quickstart's step goes on this machine: the whole step, and the step without Kimi Delta Attention.

    python benchmarks/quickstart_step.py

Both are timed in turns in one run, on real rows; the difference is what the chunked form costs, forward and backward.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from k3train.data.loader import open_data
from k3train.models import parameters
from k3train.models.initialize import initialize
from k3train.models.layout import Layout, LocalLayout
from k3train.sharding.placement import place
from k3train.train import state as train_state
from k3train.train.assembly import training
from launch.experiments import load

ROUNDS, STEPS = 7, 5


class WithoutKDA(LocalLayout):
    """Lets the values through in place of attention; everything around it stays."""

    def kda(self, q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, *, lower_bound, segment_ids_BT):
        """Values plus terms that keep every projection alive."""
        return v_BTHV * (q_BTHK + k_BTHK + gate_BTHK + dt_bias_HK) * (beta_BTH + a_log_H)[..., None]


def main() -> None:
    """Prints milliseconds per step, median and spread, and the share of KDA."""
    path = Path(__file__).parent.parent / "experiments" / "quickstart.py"
    experiment = load(Path(sys.argv[1]) if len(sys.argv) > 1 else path)
    data = open_data(experiment.data)
    graphdef, _, axes = parameters.abstract(experiment.model)
    placement = place(experiment.mesh)

    def prepare(layout: Layout) -> Callable[[], float]:
        optimizer, step = training(experiment, graphdef, axes, dataclasses.replace(placement, layout=layout))
        step = jax.jit(step, donate_argnums=0)
        state = jax.jit(lambda: train_state.create(initialize(experiment.model, 0), optimizer))()
        state, metrics = step(state, data.train_batch(0))
        held, number = [state], iter(range(1, 10**9))

        def run() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                held[0], metrics = step(held[0], data.train_batch(next(number)))
            jax.block_until_ready(metrics)
            return 1e3 * (time.perf_counter() - start) / STEPS

        return run

    runs = {"whole step": prepare(LocalLayout()), "without KDA": prepare(WithoutKDA())}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
    for name, values in times.items():
        print(f"{name:12}  median {statistics.median(values):7.1f} ms  (from {min(values):.1f} to {max(values):.1f})")
    whole, without = (statistics.median(values) for values in times.values())
    device = jax.devices()[0].device_kind
    print(f"KDA takes {100 * (1 - without / whole):.0f} % of the step; jax {jax.__version__}, {device}, {ROUNDS} x {STEPS} steps")


if __name__ == "__main__":
    main()
