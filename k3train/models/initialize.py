"""First values of all parameters (report 2.1.1 for KDA's gate; N(0, 0.02) elsewhere, as the released config says).

Layers of one kind are drawn together and their small leaves share one draw: XLA compiles a random draw in about a quarter
of a second on a CPU, which for hundreds of leaves would be minutes.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from k3train.config import ModelConfig
from k3train.models import stacks
from k3train.models.parameters import Initial, Tree, graph_and_params, marks

OWN_DRAW = 2**22  # a leaf of more entries is drawn by itself, so that no flat draw is a second copy of a large model


def initialize(config: ModelConfig, seed: int | jax.Array) -> Tree:
    """Draws the decoder's parameters. Pure, so that it can run under jit with output shardings.

    Layer l depends on (config, seed, l) alone, however the layers are stacked.
    """
    from k3train.models.decoder import Decoder  # declares what is drawn here

    model = Decoder(config)
    (_, shapes), initial = graph_and_params(model), marks(model, "initial")
    key = jax.random.key(seed)
    layer_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(config.num_layers))

    members: dict[Any, list[int]] = {}
    for layer, kind in enumerate(zip(config.mixers, config.feed_forwards, strict=True)):
        members.setdefault(kind, []).append(layer)
    drawn: dict[Any, Tree] = {}
    groups: Tree = {}
    for index, group in enumerate(stacks.groups(config)):
        groups[index] = {}
        for position in range(group.unit):
            first = group.layer(0, position)
            kind = (config.mixers[first], config.feed_forwards[first])
            if kind not in drawn:
                one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes["groups"][index][position])
                draw_layer = lambda key, one=one, how=initial["groups"][index][position]: draw(key, one, how)  # noqa: E731
                drawn[kind] = jax.vmap(draw_layer)(layer_keys[jnp.array(members[kind])])
            rows = jnp.array([members[kind].index(group.layer(repeat, position)) for repeat in range(group.repeats)])
            groups[index][position] = jax.tree.map(lambda leaf, rows=rows: leaf[rows], drawn[kind])
    rest = {name: shape for name, shape in shapes.items() if name != "groups"}
    top_key = jax.random.fold_in(key, config.num_layers)
    return {**draw(top_key, rest, {name: initial[name] for name in rest}), "groups": groups}


def draw(key: jax.Array, shapes: Tree, initial: Tree) -> Tree:
    """First values for a tree of shapes, each leaf by its `Initial`."""
    leaves, structure = jax.tree.flatten(shapes)
    hows: list[Initial] = jax.tree.leaves(initial)
    noise: dict[int, jax.Array] = {}
    for number, kind in enumerate(("normal", "uniform")):
        small = [i for i, (leaf, how) in enumerate(zip(leaves, hows, strict=True)) if how.noise == kind and leaf.size <= OWN_DRAW]
        if small:
            ends = list(accumulate(leaves[i].size for i in small))
            flat = _noise(jax.random.fold_in(key, number), kind, (ends[-1],), leaves[small[0]].dtype)
            for i, end in zip(small, ends, strict=True):
                noise[i] = flat[end - leaves[i].size : end].reshape(leaves[i].shape)
    values = []
    for i, (leaf, how) in enumerate(zip(leaves, hows, strict=True)):
        if how.noise == "none":
            values.append(how(jnp.zeros(leaf.shape, leaf.dtype)))
        else:
            values.append(how(noise[i] if i in noise else _noise(jax.random.fold_in(key, 2 + i), how.noise, leaf.shape, leaf.dtype)))
    return jax.tree.unflatten(structure, values)


def _noise(key: jax.Array, kind: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) if kind == "normal" else jax.random.uniform(key, shape, dtype)
