"""A small experiment on a small text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3train.config import (
    CheckpointConfig,
    DataConfig,
    DtypePolicy,
    EvaluationConfig,
    Experiment,
    KDAConfig,
    LoggingConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ScheduleConfig,
)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty files of words."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    words = ["state", "decay", "key", "value", "expert", "layer", "depth", "=", "+", "\n"]
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(random.choice(words, size=int(random.integers(20, 200)))))
    return folder


@pytest.fixture(scope="session")
def experiment(text_folder: Path, tiny_model: ModelConfig) -> Experiment:
    """Six steps, all of them saved and written down."""
    return Experiment(
        name="run",
        model=tiny_model,
        data=DataConfig(sources=(str(text_folder),), sequence_length=32, batch_size=4, heldout_fraction=0.2),
        schedule=ScheduleConfig(steps=6, warmup_fraction=0.2),
        checkpoint=CheckpointConfig(every_steps=1, keep=20),
        logging=LoggingConfig(every_steps=1),
        evaluation=EvaluationConfig(every_steps=4, batches=40),
    )


@pytest.fixture(scope="session")
def tiny_model() -> ModelConfig:
    """Two layers with every mechanism, in float32."""
    return ModelConfig(
        vocab_size=257,
        d_model=32,
        num_layers=2,
        mixer_pattern=("kda", "gated_mla"),
        last_mixer=None,
        dense_dim=48,
        attn_res_block_size=1,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_head_dim=16, rope_head_dim=8, v_head_dim=16),
        moe=MoEConfig(num_experts=8, experts_per_token=2, latent_dim=16, expert_dim=16, num_shared_experts=1),
        dtypes=DtypePolicy(compute="float32"),
        remat="none",
    )
