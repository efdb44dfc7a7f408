"""Experiment files for the command-line tests."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = """
from k3train.config import *

def experiment():
    return Experiment(
        name="tiny",
        model=ModelConfig(
            vocab_size=257, d_model=16, num_layers=2, mixer_pattern=("kda", "gated_mla"), dense_dim=16, attn_res_block_size=1,
            kda=KDAConfig(num_heads=2, head_dim=8),
            mla=MLAConfig(num_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=4, v_head_dim=8),
            moe=MoEConfig(num_experts=4, experts_per_token=2, latent_dim=8, expert_dim=8, num_shared_experts=1),
            remat="none",
        ),
        data=DataConfig(sources=({texts!r},), heldout_fraction=0.5, sequence_length=32, batch_size=2),
        schedule=ScheduleConfig(steps=2),
        evaluation=EvaluationConfig(batches=1),
        runs_folder={runs!r},
    )
"""


@pytest.fixture(scope="session")
def tiny_experiment(tmp_path_factory) -> Path:
    """An experiment on a few hundred bytes of text; its runs folder is `runs` beside the file."""
    folder = tmp_path_factory.mktemp("experiment")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"Document number {number} says that {number} + {number} is {2 * number}. " * 5)
    path = folder / "tiny.py"
    path.write_text(TINY.format(texts=str(texts), runs=str(folder / "runs")))
    return path


@pytest.fixture
def experiment_file(tmp_path):
    """Writes an experiment file with the given text."""

    def write(text: str, name: str = "exp.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def saved_run(tiny_experiment) -> Path:
    """The folder of a run of that experiment that made no update: its first values are saved as steps 1 and 2. Changed by no test."""
    import numpy as np

    from k3train import config_io
    from k3train.data.loader import open_data
    from k3train.train.assembly import assemble
    from k3train.train.checkpoints import Checkpoints, Record
    from launch import experiments, train

    experiment = experiments.resolve(tiny_experiment, ["--name", "saved"], "test")
    folder, data = train.new_run_folder(experiment), open_data(experiment.data)
    state = assemble(experiment, data.tokenizer.boundary_id).init()
    with Checkpoints(folder / "checkpoints", experiment.model, experiment.checkpoint) as saves:
        for step in (1, 2):
            record = Record(
                step=step, seconds=0.0, tokens=0, data_fingerprint=data.fingerprint, experiment=config_io.to_dict(experiment), versions={}
            )
            saves.save(state._replace(step=np.int32(step)), record)
    return folder
