"""How KDA's arrays are cut for the TPU kernels: sizes, grid and blocks.

B batch, T tokens, H heads, P head groups of G heads each, N blocks of tokens, C tokens of a chunk, K key and V value channels.
Grid (B, P, N). A block holds one or more chunks; the state stays in VMEM from block to block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.chunk import Arithmetic

LANES = 128
CHUNK = 128
HEAD_GROUP = 8
# Independent heads abreast fill each other's waiting times. Twice as many in the backward kernel gain a tenth and double its code.
FORWARD_ABREAST = 4
BACKWARD_ABREAST = 2
CHUNKS_PER_BLOCK = 2
VMEM_LIMIT = 56 * 2**20  # below the 64 MiB of a core of v5p and tpu7x; v6e has 128


class Geometry(NamedTuple):
    """Sizes and options of one call, fixed at trace time (hashable). `tokens` is T before any padding."""

    arithmetic: Arithmetic
    batch: int
    tokens: int
    heads: int
    key_width: int
    value_width: int
    chunk: int
    chunks_per_block: int
    packed: bool
    transition: bool
    interpret: Any

    @property
    def group(self) -> int:
        """Heads of a group: the largest divisor of H up to HEAD_GROUP."""
        return max(size for size in range(1, HEAD_GROUP + 1) if self.heads % size == 0)

    def abreast(self, most: int) -> int:
        """Heads that one iteration works on: the largest power of two up to `most` that divides the group."""
        return max(size for size in (1, 2, 4, 8) if size <= most and self.group % size == 0)

    @property
    def groups(self) -> int:
        """Head groups."""
        return self.heads // self.group

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.chunk * self.chunks_per_block

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return pl.cdiv(self.tokens, self.block)

    @property
    def state_rows(self) -> int:
        """Rows of the transposed state: value channels, and in a transition the identity's columns."""
        return self.value_width + (self.key_width if self.transition else 0)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(B, P, N)."""
        return self.batch, self.groups, self.blocks

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        """The state is carried along N; the other two may be shared among cores."""
        return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT)


def operand_specs(geometry: Geometry, *, reverse: bool) -> Mapping[str, pl.BlockSpec]:
    """Block specs by name; `reverse` walks the blocks from the last to the first."""
    g, last = geometry, geometry.blocks - 1

    def place(n: jax.Array) -> jax.Array:
        return last - n if reverse else n

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, g.block, g.group * width), lambda b, p, n: (b, place(n), p))

    return {
        "key": tokens(g.key_width),
        "value": tokens(g.value_width),
        "beta": pl.BlockSpec((1, 1, g.chunks_per_block, g.group, g.chunk), lambda b, p, n: (b, p, place(n), 0, 0)),
        "heads": pl.BlockSpec((1, g.group, g.key_width), lambda b, p, n: (p, 0, 0)),
        "d_heads": pl.BlockSpec((1, 1, g.group, g.key_width), lambda b, p, n: (b, p, 0, 0)),
        "code": pl.BlockSpec((1, 1, g.block), lambda b, p, n: (b, 0, place(n))),
        "state": pl.BlockSpec((1, g.group, g.state_rows, g.key_width), lambda b, p, n: (b, p, 0, 0)),
        "states": pl.BlockSpec((1, 1, g.group, g.state_rows, g.key_width), lambda b, p, n: (b, place(n), p, 0, 0)),
    }
