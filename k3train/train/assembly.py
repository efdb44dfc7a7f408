"""Model, mesh, optimizer and compiled steps of an experiment, put together without making an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.stages import Wrapped

from k3train.config import Experiment, ModelConfig
from k3train.data.batch import Batch
from k3train.errors import UserError
from k3train.models import parameters, stacks
from k3train.models.initialize import initialize
from k3train.optim import build_optimizer, learning_rates
from k3train.sharding.placement import Placement, place
from k3train.train import state as train_state
from k3train.train.compile_cache import runs_briefly
from k3train.train.determinism import compiler_options
from k3train.train.evaluation import build_eval_step
from k3train.train.report import build_report
from k3train.train.state import TrainState, Tree
from k3train.train.step import Aux, Evidence, Forward, Metrics, build_train_step


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
    placement = place(experiment.mesh, experiment.kernels)
    _check_rows(experiment, placement.row_shards)
    graphdef, params, axes = parameters.abstract(experiment.model)
    optimizer, train_step = training(experiment, graphdef, axes, placement)
    abstract = train_state.abstract(params, optimizer)
    shardings = train_state.shardings(abstract, placement.params(axes, params), placement.replicated)

    def init() -> TrainState:
        return train_state.create(initialize(experiment.model, experiment.seed), optimizer)

    eval_step = build_eval_step(build_forward(graphdef, placement), boundary_id)
    options: dict[str, Any] = compiler_options(experiment)
    rows = (experiment.data.batch_size, experiment.data.sequence_length)
    kinds = dict.fromkeys(Batch._fields, np.int32) | {"loss_mask": np.float32}
    fields: dict[str, Any] = {name: jax.ShapeDtypeStruct(rows, dtype, sharding=placement.batch) for name, dtype in kinds.items()}
    return Assembly(
        target=jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings),
        batch=Batch(**fields),
        init=jax.jit(init, out_shardings=shardings, compiler_options=options | runs_briefly()),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, placement.replicated), compiler_options=options),
        eval_step=jax.jit(eval_step, out_shardings=placement.replicated, compiler_options=options),
        put=lambda batch: jax.device_put(batch, placement.batch),
    )


def training(
    experiment: Experiment, graphdef: nnx.GraphDef[Any], axes: Tree, placement: Placement
) -> tuple[optax.GradientTransformationExtraArgs, Callable[[TrainState, Batch], tuple[TrainState, Metrics]]]:
    """The optimizer and the step, a pure function."""
    model, config = experiment.model, experiment.optimizer
    optimizer = build_optimizer(config, experiment.schedule, axes, balancing=model.moe.balancing)
    step = build_train_step(
        build_forward(graphdef, placement, collect=True),
        optimizer,
        evidence=lambda aux: evidence(aux, model),
        report=build_report(model, config.qk_clip),
        learning_rates=learning_rates(config, experiment.schedule),
        microbatches=config.microbatches,
        row_shards=placement.row_shards,
    )
    return optimizer, step


def build_forward(graphdef: nnx.GraphDef[Any], placement: Placement, *, collect: bool = False) -> Forward:
    """The decoder as a pure function of its parameters and a batch; `collect` as in `Decoder`."""

    def forward(params: Tree, batch: Batch) -> tuple[jax.Array, Aux]:
        output = nnx.merge(graphdef, params)(batch.tokens, batch.segment_ids, layout=placement.layout, collect=collect)
        return output.logits_BTV, output.aux

    return forward


def evidence(aux: Aux, config: ModelConfig) -> Evidence:
    """A step's side outputs per layer as the optimizer takes them, by parameter. Here the shards' histograms become one."""
    experts = [layer for layer, kind in enumerate(config.feed_forwards) if kind != "dense"]
    attention = [layer for layer, kind in enumerate(config.mixers) if kind != "kda"]
    bias, query = ("ffn", "router_bias"), ("mixer", "q_up")

    def by_parameter(name: str, layers: list[int], leaf: tuple[str, str]) -> dict[tuple[str, ...], jax.Array]:
        if name not in aux or not layers:
            return {}
        values = jnp.sum(aux[name], axis=1) if name == "histogram" else aux[name]
        return stacks.by_parameter(values, config, layers, leaf)

    return {
        "histograms": by_parameter("histogram", experts, bias),
        "loads": by_parameter("expert_load", experts, bias),
        "max_logits": by_parameter("max_logit", attention, query),
    }


def _check_rows(experiment: Experiment, row_shards: int) -> None:
    """The same rule as in `Experiment.validate`, for a mesh whose size was not stated."""
    batch_size, microbatches = experiment.data.batch_size, experiment.optimizer.microbatches
    if batch_size % (microbatches * row_shards):
        raise UserError(
            f"data.batch_size = {batch_size}: must be a multiple of optimizer.microbatches = {microbatches} times the {row_shards} devices "
            "that share the rows. Change one of them, or use fewer devices."
        )
