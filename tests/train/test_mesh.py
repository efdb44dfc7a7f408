"""A run that began on one device goes on, on eight, with the same losses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from k3train import config_io
from k3train.config import CheckpointConfig, Experiment, MeshConfig, OptimizerConfig, ScheduleConfig
from k3train.train import loop, metrics

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

ON_EIGHT = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
from k3train import config_io
from k3train.train import loop
from k3train.train.resume import Resume
folder = Path(sys.argv[1])
loop.run(config_io.load(folder / "eight.json"), folder, resume=Resume())
print("devices:", jax.device_count())
"""


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics.read(folder / loop.METRICS_FILE) if "loss" in line}


@pytest.mark.numerics
def test_eight_devices_go_on_where_one_began(experiment: Experiment, tmp_path: Path):
    """Two microbatches; parameters, moments and rows lie split over 2 x 4 devices."""
    one = dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, batch_size=16),
        optimizer=OptimizerConfig(microbatches=2),
        schedule=ScheduleConfig(steps=4, warmup_fraction=0.3),
        checkpoint=CheckpointConfig(every_steps=2),
    )
    folder = tmp_path / "run"
    folder.mkdir()
    loop.run(one, folder, console=Console(file=io.StringIO()))
    expected = losses(folder)

    for name in (f"{loop.CHECKPOINTS_FOLDER}/4", loop.RESULT_FILE):
        (folder / name).rename(tmp_path / Path(name).name)
    lines = [line for line in metrics.read(folder / loop.METRICS_FILE) if line["step"] <= 2]
    (folder / loop.METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config_io.save(dataclasses.replace(one, mesh=MeshConfig(replica=2, fsdp=4)), folder / "eight.json")
    process = subprocess.run(
        [sys.executable, "-c", ON_EIGHT, str(folder)], capture_output=True, text=True, cwd=ROOT, env=os.environ | QUICK, timeout=500
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "devices: 8" in process.stdout
    assert losses(folder) == pytest.approx(expected, abs=1e-5)
