"""Leaves of a parameter tree by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

Path = tuple[str, ...]


def path_of(path: tuple[Any, ...]) -> Path:
    """A pytree path as strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
    """The leaves of a tree, keyed by path."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def map_by_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function receives the leaf's path first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_of(path), *leaves), tree, *rest)


def require(what: str, given: Iterable[Path], known: Iterable[Path]) -> None:
    """Raises `ValueError` for a path that names no leaf: its array would be ignored without a word."""
    unknown = sorted("/".join(path) for path in set(given) - set(known))
    if unknown:
        raise ValueError(f"{what} given for {unknown}, which are no such leaves of the parameters")
