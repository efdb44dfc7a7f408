"""The depth axis: what a sublayer reads of those before it. Three forms, one interface.

    form                        the input of a sublayer
    block_attention_residuals   mix of the embedding, every completed block's sum, and the running sum of the block under way
    full_attention_residuals    mix of the embedding and the output of every earlier sublayer
    residual                    sum of the embedding and the output of every earlier sublayer

A form is a small immutable pytree that holds what earlier depths left. A layer changes its `carry` alone; the rest is shared, so that
a scan carries the one, closes over the other, and keeps each completed block once.
Legend: B batch, T tokens, D model, N sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from k3train.config import ModelConfig
from k3train.models.attention_residuals import AttentionResidual, Source, source

Carry = Any
Read = tuple[jax.Array, jax.Array | None]
"""A sublayer's input [B, T, D], and the weights [N, B, T] of the sources that it mixes, if it mixes."""


class Depth(Protocol):
    """What earlier sublayers left behind."""

    def read(self, site: AttentionResidual | None) -> Read:
        """The input of the next sublayer, whose mixing site this is."""
        ...

    def add(self, y_BTD: jax.Array) -> Self:
        """Takes a sublayer's output."""
        ...

    def close_block(self) -> Self:
        """Ends a block of layers."""
        ...

    @property
    def carry(self) -> Carry:
        """What the layer under way has changed; `with_carry` puts it back into the form that the layer was given."""
        ...

    def with_carry(self, carry: Carry) -> Self:
        """See `carry`."""
        ...

    @property
    def latest_BTD(self) -> jax.Array:
        """What a layer leaves: the running sum, or what its own sublayers put out."""
        ...

    @property
    def kept(self) -> tuple[Source, ...]:
        """The sources that no later layer changes."""
        ...


def begin(config: ModelConfig, embedded_BTD: jax.Array) -> Depth:
    """The config's form before the first layer."""
    match config.depth:
        case "block_attention_residuals":
            first = source(embedded_BTD, config.norm_eps)
            return BlockAttentionResiduals((first,), jnp.zeros_like(embedded_BTD), True, config.norm_eps)
        case "full_attention_residuals":
            return FullAttentionResiduals((source(embedded_BTD, config.norm_eps),), (), config.norm_eps)
        case "residual":
            return PlainResidual(embedded_BTD)


def mixing_site(config: ModelConfig) -> AttentionResidual | None:
    """The parameters of one `Depth.read`."""
    return None if config.depth == "residual" else AttentionResidual(config)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockAttentionResiduals:
    """h = sum_i p_i b_i + p_N r over completed blocks b and the running sum r of the block under way (report eqs 8-10).

    The embedding is the first block and enters no sum. Where the sum is empty it does not count: a block's first sublayer sees
    completed blocks only (eq. 10, first case).
    """

    blocks: tuple[Source, ...]
    running_BTD: jax.Array
    empty: bool | jax.Array
    eps: float = field(metadata={"static": True})

    def read(self, site: AttentionResidual | None) -> Read:
        """See `Depth`."""
        assert site is not None
        return site((*self.blocks, source(self.running_BTD, self.eps)), jnp.logical_not(self.empty))

    def add(self, y_BTD: jax.Array) -> Self:
        """See `Depth`."""
        return replace(self, running_BTD=self.running_BTD + y_BTD, empty=False)

    def close_block(self) -> Self:
        """See `Depth`."""
        blocks = (*self.blocks, source(self.running_BTD, self.eps))
        return replace(self, blocks=blocks, running_BTD=jnp.zeros_like(self.running_BTD), empty=True)

    @property
    def carry(self) -> Carry:
        """See `Depth`."""
        return self.running_BTD, self.empty

    def with_carry(self, carry: Carry) -> Self:
        """See `Depth`."""
        return replace(self, running_BTD=carry[0], empty=carry[1])

    @property
    def latest_BTD(self) -> jax.Array:
        """See `Depth`."""
        return self.running_BTD

    @property
    def kept(self) -> tuple[Source, ...]:
        """See `Depth`."""
        return self.blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullAttentionResiduals:
    """h = sum_i p_i v_i over the embedding and every earlier sublayer's output v (report eqs 8-9)."""

    sources: tuple[Source, ...]
    new: tuple[Source, ...]
    """Outputs of the layer under way."""
    eps: float = field(metadata={"static": True})

    def read(self, site: AttentionResidual | None) -> Read:
        """See `Depth`."""
        assert site is not None
        return site((*self.sources, *self.new))

    def add(self, y_BTD: jax.Array) -> Self:
        """See `Depth`."""
        return replace(self, new=(*self.new, source(y_BTD, self.eps)))

    def close_block(self) -> Self:
        """There are no blocks."""
        return self

    @property
    def carry(self) -> Carry:
        """See `Depth`."""
        return self.new

    def with_carry(self, carry: Carry) -> Self:
        """See `Depth`."""
        return replace(self, sources=(*self.sources, *carry), new=())

    @property
    def latest_BTD(self) -> jax.Array:
        """See `Depth`; read before the layer's outputs join the others."""
        return sum((y.value_BTD for y in self.new[1:]), self.new[0].value_BTD)

    @property
    def kept(self) -> tuple[Source, ...]:
        """See `Depth`."""
        return self.sources


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainResidual:
    """h = x_0 + sum_i y_i: the embedding and every earlier sublayer's output, summed in the compute dtype."""

    running_BTD: jax.Array

    def read(self, site: AttentionResidual | None) -> Read:
        """See `Depth`; there is nothing to choose."""
        return self.running_BTD, None

    def add(self, y_BTD: jax.Array) -> Self:
        """See `Depth`."""
        return replace(self, running_BTD=self.running_BTD + y_BTD)

    def close_block(self) -> Self:
        """There are no blocks."""
        return self

    @property
    def carry(self) -> Carry:
        """See `Depth`."""
        return self.running_BTD

    def with_carry(self, carry: Carry) -> Self:
        """See `Depth`."""
        return replace(self, running_BTD=carry)

    @property
    def latest_BTD(self) -> jax.Array:
        """See `Depth`."""
        return self.running_BTD

    @property
    def kept(self) -> tuple[Source, ...]:
        """See `Depth`."""
        return ()
