"""Schedules, parameter labels and the one Optax chain that joins them. Knows of a model only its tree of logical axes."""

from k3train.optim.chain import build_optimizer
from k3train.optim.labels import labels
from k3train.optim.schedules import warmup_cosine

__all__ = ["build_optimizer", "labels", "warmup_cosine"]
