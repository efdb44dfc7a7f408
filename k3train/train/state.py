"""The train state: everything that a step reads and replaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3train.optim.paths import by_path, path_of

Tree = Any


class TrainState(NamedTuple):
    """A pytree; the same shape holds arrays, `jax.ShapeDtypeStruct`s or shardings."""

    step: Any
    """int32 scalar: updates made so far, and so the number of the next batch."""
    params: Tree
    """Pure nested dict of the parameters."""
    optimizer: Tree
    """Optax state."""


def create(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. Pure: run it under jit, with output shardings where there is a mesh."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))


def abstract(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state for parameters given as `jax.ShapeDtypeStruct`, without making an array."""
    return jax.eval_shape(lambda tree: create(tree, optimizer), params)


def like_params(tree: Tree, params: Tree, default: Any) -> Tree:
    """Gives each leaf of `tree` the entry of the parameter that it accompanies.

    A leaf accompanies the parameter whose path ends its own (a moment at `.../mu/head/kernel` accompanies `head/kernel`).

    Args:
      tree: any pytree, such as an optimizer state.
      params: tree of values (shardings, say) shaped like the parameters.
      default: for leaves that accompany none, such as counters.
    """
    entries = by_path(params)

    def entry(path: tuple[Any, ...], _: Any) -> Any:
        names = path_of(path)
        return next((entries[names[start:]] for start in range(len(names)) if names[start:] in entries), default)

    return jax.tree_util.tree_map_with_path(entry, tree)


def shardings(state: TrainState, params: Tree, replicated: Any) -> TrainState:
    """Shardings of a state: moments lie where their parameters lie, counters are replicated."""
    return TrainState(step=replicated, params=params, optimizer=like_params(state.optimizer, params, replicated))


def count(params: Tree) -> int:
    """Number of parameters, from arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
