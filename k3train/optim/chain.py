"""The one Optax chain: finite gate -> clip -> the update that each parameter's label names -> QK-clip."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import optax

from k3train.config import AdamWConfig, Balancing, MuonConfig, OptimizerConfig, ScheduleConfig, ScheduleKind
from k3train.optim.finite_gate import finite_gate
from k3train.optim.global_norm import clip_by_global_norm
from k3train.optim.labels import ADAMW, ADAMW_NO_DECAY, BALANCE, MUON, MUON_PER_HEAD, labels
from k3train.optim.muon import scale_by_muon
from k3train.optim.qk_clip import qk_clip
from k3train.optim.quantile_balance import balance
from k3train.optim.schedules import Schedule, learning_rate


def build_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    axes: Any,
    *,
    balancing: Balancing,
) -> optax.GradientTransformationExtraArgs:
    """Everything between gradients and what is added to the parameters (docs/optimizer.md has the picture).

    The transformation's `update(grads, state, params, *, loss, histograms, loads, max_logits)` takes beside the usual three:
      loss: scalar of the step.
      histograms, loads: dicts from the path of a `router_bias`, a tuple of names, to int32 [..., E, bins] and [..., E], summed over
        all tokens of the step; leading dims are the leaf's.
      max_logits: dict from the path of a `q_up` to float32 [..., H], the largest logit of each head.
    A path that is absent from a dict is not touched by that rule. The state is a `FiniteGateState`.

    Args:
      config: rates and limits of the updates.
      schedule: course of the learning rates, which multiply the decay too; they count applied updates.
      axes: tree of tuples of logical axis names, shaped like the parameters.
      balancing: rule of the router biases.
    """

    def muon(per_head: bool) -> optax.GradientTransformation:
        own = config.muon
        return optax.chain(
            scale_by_muon(axes, per_head=per_head, momentum=own.momentum, steps=own.newton_schulz_steps, dtype=own.newton_schulz_dtype),
            optax.add_decayed_weights(own.weight_decay),
            optax.scale_by_learning_rate(_rate(config, own, schedule)),
        )

    def adamw(weight_decay: float) -> optax.GradientTransformation:
        own = config.adamw
        return optax.adamw(_rate(config, own, schedule), b1=own.beta1, b2=own.beta2, eps=own.eps, weight_decay=weight_decay)

    updates: dict[Hashable, optax.GradientTransformation] = {
        MUON: muon(per_head=False),
        MUON_PER_HEAD: muon(per_head=True),
        ADAMW: adamw(config.adamw.weight_decay),
        ADAMW_NO_DECAY: adamw(0.0),
        BALANCE: balance(balancing, sign_rate=config.sign_balance_rate, quantile_momentum=config.quantile_momentum),
    }
    links = [clip_by_global_norm(config.clip_norm), optax.partition(updates, labels(axes, config))]
    if config.qk_clip is not None:
        links.append(qk_clip(config.qk_clip))
    return finite_gate(optax.chain(*links))


def learning_rates(config: OptimizerConfig, schedule: ScheduleConfig) -> dict[str, Schedule]:
    """The chain's rates, for metrics: `learning_rate` of the matrices' rule, and `learning_rate_adamw` where AdamW's differs."""
    muon, adamw = config.muon, config.adamw
    main = adamw if config.matrices == "adamw" else muon
    rates = {"learning_rate": _rate(config, main, schedule)}
    if _course(config, main, schedule) != _course(config, adamw, schedule):
        rates["learning_rate_adamw"] = _rate(config, adamw, schedule)
    return rates


def _course(config: OptimizerConfig, own: MuonConfig | AdamWConfig, schedule: ScheduleConfig) -> tuple[float, ScheduleKind]:
    """Peak and kind of a rule: its own, or else the run's."""
    return config.peak_lr if own.peak_lr is None else own.peak_lr, schedule.kind if own.kind is None else own.kind


def _rate(config: OptimizerConfig, own: MuonConfig | AdamWConfig, schedule: ScheduleConfig) -> Schedule:
    return learning_rate(*_course(config, own, schedule), schedule)
