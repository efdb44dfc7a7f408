"""Kimi K3 as released: 2.78 T parameters, 104 B of them active per token.

    k3train summary experiments/kimi_k3_2p8t.py

The model is the published text configuration, field by field the defaults of `ModelConfig`. What the report does not print (batch, learning
rate, length of the run) is a placeholder here; the schedule's shape, the weight decay and the warm-up are the report's (3.3).
"""

from k3train.config import DataConfig, Experiment, ModelConfig, OptimizerConfig, ScheduleConfig


def experiment() -> Experiment:
    """The released model."""
    return Experiment(
        name="kimi-k3-2p8t",
        model=ModelConfig(),
        data=DataConfig(sequence_length=4096, batch_size=4096),
        schedule=ScheduleConfig(steps=1_000_000, warmup_fraction=0.01, final_fraction=0.1),
        optimizer=OptimizerConfig(peak_lr=2e-4),
    )
