"""The decoder over a cache: a prompt at once, then token by token.

The layers are the training model's own; only their mixers read and write the cache. They run one by one, so that every layer's cache is a
buffer of its own that a step updates in place.
Legend: B batch, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config import ModelConfig
from k3train.inference.cache import LAYOUT, Cache, LayerCache, advance, empty
from k3train.models import stacks
from k3train.models.decoder import Decoder
from k3train.models.depth import begin
from k3train.models.kda import KimiDeltaAttention
from k3train.models.layout import Layout
from k3train.models.mla import LatentAttention
from k3train.models.parameters import Tree, abstract, graph_and_params


class Forward:
    """The two pure functions of a model's parameters, to be jitted."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.graphdef, _, _ = abstract(config)

    def prefill(self, params: Tree, tokens_BT: jax.Array, lengths_B: jax.Array, max_length: int) -> tuple[jax.Array, Cache]:
        """Prompts int32 [B, T], of which the first `lengths_B` (at least one) tokens count -> next-token logits [B, V] and the cache.

        The cache has room for `max_length` tokens, prompt included.
        """
        real_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
        return self._run(params, tokens_BT, real_BT, empty(self.config, len(tokens_BT), max_length))

    def step(self, params: Tree, token_B: jax.Array, goes_on_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """One more token int32 [B] -> next-token logits [B, V] and the cache; rows that do not go on keep theirs and get no logits.

        Rows that go on must hold fewer than `max_length` tokens.
        """
        return self._run(params, token_B[:, None], goes_on_B[:, None], cache)

    def _run(self, params: Tree, tokens_BT: jax.Array, real_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        decoder = nnx.merge(self.graphdef, params)
        hidden_BTD, layers = _hidden(decoder, tokens_BT, real_BT, cache)
        new_B = jnp.sum(real_BT, axis=1, dtype=jnp.int32)
        last_B1D = jnp.take_along_axis(hidden_BTD, jnp.maximum(new_B - 1, 0)[:, None, None], axis=1)
        return decoder.head(last_B1D)[:, 0], Cache(layers, cache.lengths_B + new_B)


class _OverCache:
    """Stands in a layer for its mixer."""

    def __init__(self, mixer: KimiDeltaAttention | LatentAttention, cache: LayerCache, lengths_B: jax.Array):
        self.mixer, self.cache, self.lengths_B = mixer, cache, lengths_B

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array, layout: Layout, *, collect: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        y_BTD, self.cache = advance(self.mixer, x_BTD, segment_ids_BT >= 0, self.cache, self.lengths_B)
        return y_BTD, {}


def _hidden(decoder: Decoder, tokens_BT: jax.Array, real_BT: jax.Array, cache: Cache) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Last hidden states [B, T, D], after the last norm, and the layers' caches."""
    config, segment_ids_BT = decoder.config, jnp.where(real_BT, 0, -1)
    depth = begin(config, decoder.embed(tokens_BT))
    kept: list[LayerCache] = []
    groups = iter(decoder.groups)
    for number, block in enumerate(stacks.plan(config)):
        depth = depth.close_block() if number else depth
        for group in block:
            split = [graph_and_params(layer) for layer in next(groups)]
            for repeat in range(group.repeats):
                for graphdef, params in split:
                    layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, r=repeat: leaf[r], params))
                    layer.mixer = over = _OverCache(layer.mixer, cache.layers[len(kept)], cache.lengths_B)
                    after, _ = layer(depth, segment_ids_BT, LAYOUT, False)
                    depth = depth.with_carry(after.carry)
                    kept.append(over.cache)
    return decoder.norm(depth.read(decoder.output_res)[0]), tuple(kept)
