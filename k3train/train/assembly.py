"""Model, mesh, optimizer and compiled steps of an experiment, put together without making an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.stages import Wrapped

from k3train.config import Experiment
from k3train.data.batch import Batch
from k3train.errors import UserError
from k3train.models import parameters
from k3train.models.initialize import initialize
from k3train.optim import build_optimizer, warmup_cosine
from k3train.sharding.placement import Placement, place
from k3train.train import state as train_state
from k3train.train.evaluation import build_eval_step
from k3train.train.state import TrainState, Tree
from k3train.train.step import Aux, Forward, build_train_step


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What a run computes with. Nothing is compiled before it is first called or lowered."""

    target: TrainState
    """Shapes, dtypes and shardings of the state."""
    batch: Batch
    """The same of a batch."""
    init: Callable[[], TrainState]
    train_step: Wrapped
    """(state, batch) -> (state, metrics), jitted; takes over the state's memory."""
    eval_step: Wrapped
    """(parameters, batch) -> sums, jitted."""
    put: Callable[[Batch], Batch]
    """Lays a host batch on the devices."""


def assemble(experiment: Experiment, boundary_id: int) -> Assembly:
    """Builds everything that depends on the config alone.

    Raises:
      UserError: the mesh does not fit the devices, the batch does not fit the mesh, or a dtype is switched off.
    """
    dtypes = experiment.model.dtypes
    if "float64" in (dtypes.parameters, dtypes.compute) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError("model.dtypes asks for float64: set JAX_ENABLE_X64=1 in the environment, or use float32.")
    placement = place(experiment.mesh)
    _check_rows(experiment, placement.row_shards)
    graphdef, params, axes = parameters.abstract(experiment.model)
    optimizer = build_optimizer(experiment.optimizer, experiment.schedule, axes)
    abstract = train_state.abstract(params, optimizer)
    shardings = train_state.shardings(abstract, placement.params(axes, params), placement.replicated)
    forward = build_forward(graphdef, placement)
    train_step = build_train_step(
        forward,
        optimizer,
        warmup_cosine(experiment.optimizer.peak_lr, experiment.schedule),
        microbatches=experiment.optimizer.microbatches,
        row_shards=placement.row_shards,
    )

    def init() -> TrainState:
        return train_state.create(initialize(experiment.model, experiment.seed), optimizer)

    rows = (experiment.data.batch_size, experiment.data.sequence_length)
    kinds = dict.fromkeys(Batch._fields, np.int32) | {"loss_mask": np.float32}
    fields: dict[str, Any] = {name: jax.ShapeDtypeStruct(rows, dtype, sharding=placement.batch) for name, dtype in kinds.items()}
    return Assembly(
        target=jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings),
        batch=Batch(**fields),
        init=jax.jit(init, out_shardings=shardings, compiler_options=_quick_to_compile()),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, placement.replicated)),
        eval_step=jax.jit(build_eval_step(forward, boundary_id), out_shardings=placement.replicated),
        put=lambda batch: jax.device_put(batch, placement.batch),
    )


def build_forward(graphdef: nnx.GraphDef[Any], placement: Placement) -> Forward:
    """The decoder as a pure function of its parameters and a batch."""

    def forward(params: Tree, batch: Batch) -> tuple[jax.Array, Aux]:
        output = nnx.merge(graphdef, params)(batch.tokens, batch.segment_ids, layout=placement.layout)
        return output.logits_BTV, output.aux

    return forward


def _check_rows(experiment: Experiment, row_shards: int) -> None:
    """The same rule as in `Experiment.validate`, for a mesh whose size was not stated."""
    batch_size, microbatches = experiment.data.batch_size, experiment.optimizer.microbatches
    if batch_size % (microbatches * row_shards):
        raise UserError(
            f"data.batch_size = {batch_size}: must be a multiple of optimizer.microbatches = {microbatches} times the {row_shards} devices "
            "that share the rows. Change one of them, or use fewer devices."
        )


def _quick_to_compile() -> dict[str, int]:
    """Compiler options for a program that runs once: on CPUs, optimising the random draws takes five times as long as leaving them."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
