"""Schedules, parameter labels, update rules and the one Optax chain that joins them. Knows of a model only its tree of logical axes."""

from k3train.optim.chain import build_optimizer, learning_rates
from k3train.optim.finite_gate import FiniteGateState
from k3train.optim.global_norm import global_norm
from k3train.optim.labels import labels
from k3train.optim.schedules import Schedule, learning_rate

__all__ = ["FiniteGateState", "Schedule", "build_optimizer", "global_norm", "labels", "learning_rate", "learning_rates"]
