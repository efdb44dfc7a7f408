"""Parameters: how modules declare them, and their shapes and axis names without arrays.

A module declares each parameter as an `nnx.Param` that holds a shape, with two marks: `axes`, a tuple of logical names, one
per dim, and `initial`, how its first values are drawn. Values come from `initialize.initialize`, a checkpoint or a Hugging
Face folder, as a pure nested dict, and `nnx.merge(graphdef, params)` puts them in place. Sharding rules, optimizer
labels and file formats derive from the axis names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig

Tree = dict[Any, Any]
Axes = tuple[str, ...]


class Initial(Protocol):
    """Maps noise to first values; hashable, since it is part of a module's static structure."""

    @property
    def noise(self) -> str:
        """`normal` for N(0, 1), `uniform` for U[0, 1), `none`."""
        ...

    def __call__(self, noise: jax.Array) -> jax.Array:
        """Values of the noise's shape and dtype."""
        ...


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float
    noise: str = "normal"

    def __call__(self, noise: jax.Array) -> jax.Array:
        """See `Initial`."""
        return self.std * noise


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float
    noise: str = "uniform"

    def __call__(self, noise: jax.Array) -> jax.Array:
        """See `Initial`."""
        return self.bound * (2.0 * noise - 1.0)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float
    noise: str = "none"

    def __call__(self, noise: jax.Array) -> jax.Array:
        """See `Initial`."""
        return jnp.full_like(noise, self.value)


def declare(shape: tuple[int, ...], axes: Axes, initial: Initial, config: ModelConfig) -> nnx.Param:
    """A parameter of the policy's dtype, without values."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtypes.parameters)), axes=axes, initial=initial)


def weight(shape: tuple[int, ...], axes: Axes, config: ModelConfig) -> nnx.Param:
    """A matrix that starts as N(0, init_std^2)."""
    return declare(shape, axes, Normal(config.init_std), config)


def ones(shape: tuple[int, ...], axes: Axes, config: ModelConfig) -> nnx.Param:
    """A norm's weight."""
    return declare(shape, axes, Constant(1.0), config)


def zeros(shape: tuple[int, ...], axes: Axes, config: ModelConfig) -> nnx.Param:
    """A parameter that starts at zero."""
    return declare(shape, axes, Constant(0.0), config)


def graph_and_params(model: nnx.Module) -> tuple[nnx.GraphDef, Tree]:
    """Splits a module into its structure and a pure dict of its parameters; `nnx.merge` joins them again."""
    graphdef, state = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(state)


def marks(model: nnx.Module, name: str) -> Tree:
    """A tree like the parameters of what each is marked with: `axes` or `initial`."""
    state = nnx.state(model, nnx.Param)
    marked = jax.tree.map(lambda param: param.get_metadata()[name], state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return nnx.to_pure_dict(marked)


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, Tree, Tree]:
    """Structure, parameters as `jax.ShapeDtypeStruct`, and axis names of the decoder. Makes no array."""
    from k3train.models.decoder import Decoder  # the decoder itself imports this file

    model = Decoder(config)
    return *graph_and_params(model), marks(model, "axes")
