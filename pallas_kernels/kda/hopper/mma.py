"""Matrix products of one warpgroup, in the form that runs on the chip and in the form that interprets.

The interpreter of Mosaic GPU knows neither register operands nor initialised accumulators of `wgmma`; these two are
used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # a vector with one entry per matrix row
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a vector with one entry per matrix column

# Every 16-bit tile in shared memory has the same form: 128-byte rows, swizzled, which `wgmma`, TMA and `ldmatrix` all take.
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def zeros(rows: int, columns: int) -> jax.Array:
    """FP32 zeros in the accumulator layout."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def tile(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory for a 16-bit matrix operand."""
    return plgpu.SMEM(shape, dtype, transforms=TILE)


def load_wide(ref, interpret: bool) -> jax.Array:
    """A bf16 tile from shared memory as FP32: one instruction per entry, where the compiler's own conversion takes 1.5."""
    narrow = plgpu.load(ref, layout=WGMMA)
    if interpret:
        return narrow.astype(jnp.float32)
    return plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(narrow.shape, jnp.dtype(jnp.float32), layout=WGMMA))(
        _widen
    )(narrow)


def _widen(ctx, narrow):
    """The high half of a register is an FP32 number but for its last bits; the low half needs a shift."""
    del ctx
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    sixteen, high_half = (arith.constant(i32, ir.IntegerAttr.get(i32, x)) for x in (16, -65536))
    registers = np.empty_like(narrow.registers)
    for at, pair in np.ndenumerate(narrow.registers):
        bits = mgpu.utils.bitcast(pair, i32)
        halves = arith.shli(bits, sixteen), arith.andi(bits, high_half)
        registers[at] = vector.from_elements(ir.VectorType.get((2,), f32), [mgpu.utils.bitcast(x, f32) for x in halves])
    return mgpu.FragmentedArray(_registers=registers, _layout=narrow.layout, _is_signed=None)


def matmuls(groups: Sequence[tuple[jax.Array, Sequence[tuple]]], interpret: bool) -> list[Any]:
    """`init + sum of a @ b` for every group `(init, [(a, b), ...])`, all in flight at once.

    `a` is a register array or a shared-memory ref [64, K], `b` a shared-memory ref [K, N], `init` FP32 [64, N].
    """
    if interpret:
        return [_emulated(init, terms) for init, terms in groups]

    def issue(accs):
        for acc, (_, terms) in zip(accs, groups, strict=True):
            for a, b in terms:
                plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    results = pl.run_state(issue)(tuple(plgpu.ACC.init(init) for init, _ in groups))
    # Without the barrier LLVM may move a use before the wait (a negation, for example): then ptxas makes every product wait for itself.
    return [lax.optimization_barrier(result) for result in results]


def _emulated(init, terms):
    value = init
    for a, b in terms:
        a = a if isinstance(a, jax.Array) else a[...]
        value = value + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32), precision="highest")
    return value
