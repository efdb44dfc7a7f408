"""One head's chunk of KDA as a function of values in VMEM; the backward kernel differentiates it.

C tokens of a chunk, K key channels, V value channels. The state is held transposed, [V, K], so that its decay is a row.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.lax import broadcasted_iota

from pallas_kernels.kda.inputs import normalize, sigmoid
from pallas_kernels.kda.tiles import TILE
from pallas_kernels.kda.tpu.matmul import Passes, matmul, matmul_nt, matmul_tn
from pallas_kernels.kda.tpu.solve import below_diagonal, embed_later_blocks, later_blocks, solve

GROUP = 8  # tokens of a vector register; the reference of a 16-token tile lies between its two groups


class Arithmetic(NamedTuple):
    """Constants of the mathematics, fixed at trace time."""

    lower_bound: float
    scale: float
    full: bool

    @property
    def passes(self) -> Passes:
        """Of ordinary products."""
        return "f32" if self.full else "bf16"

    @property
    def solve_passes(self) -> Passes:
        """Of the triangular solve."""
        return "f32" if self.full else "split"


class Raw(NamedTuple):
    """A chunk's inputs, float32; q is None where no output is wanted."""

    q_CK: jax.Array | None
    k_CK: jax.Array
    v_CV: jax.Array
    gate_CK: jax.Array
    beta_1C: jax.Array
    slope_1K: jax.Array
    bias_1K: jax.Array


class Packing(NamedTuple):
    """Documents of a chunk, float32 numbers and 0/1 masks: `number` counts from the document whose state enters."""

    number_1C: jax.Array
    number_C1: jax.Array
    real_C1: jax.Array
    goes_on_C1: jax.Array
    reaches_end_C1: jax.Array
    keeps_state_11: jax.Array


def column(x_1C: jax.Array) -> jax.Array:
    """[1, C] -> [C, 1]: the transpose of a single row."""
    size = x_1C.shape[1]
    diagonal = broadcasted_iota(jnp.int32, (size, size), 0) == broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.sum(jnp.where(diagonal, x_1C, 0.0), axis=1, keepdims=True)


def unpack(code_1C: jax.Array) -> Packing:
    """`code` is a token's document number, or -1 - number at padding, as float32."""

    def decode(code: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(code >= 0, code, -1.0 - code), jnp.where(code >= 0, 1.0, 0.0)

    number_1C, _ = decode(code_1C)
    number_C1, real_C1 = decode(column(code_1C))
    last_11 = jnp.max(number_1C, axis=1, keepdims=True)
    return Packing(
        number_1C,
        number_C1,
        real_C1,
        goes_on_C1=jnp.where(number_C1 == 0, 1.0, 0.0),
        reaches_end_C1=jnp.where(number_C1 == last_11, 1.0, 0.0),
        keeps_state_11=jnp.where(last_11 == 0, 1.0, 0.0),
    )


def _scan_group(x_CK: jax.Array, *, forward: bool, inclusive: bool) -> jax.Array:
    """Sums over the tokens of a group up to each token (or from it on)."""
    chunk = x_CK.shape[0]
    place = lax.rem(broadcasted_iota(jnp.int32, x_CK.shape, 0), GROUP)

    def shifted(x_CK: jax.Array, by: int) -> jax.Array:
        if forward:
            return jnp.where(place >= by, pltpu.roll(x_CK, by, 0), 0.0)
        return jnp.where(place < GROUP - by, pltpu.roll(x_CK, chunk - by, 0), 0.0)

    by = 1
    while by < GROUP:
        x_CK, by = x_CK + shifted(x_CK, by), 2 * by
    return x_CK if inclusive else shifted(x_CK, 1)


@jax.custom_vjp
def group_sums(g_CK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log decays from a group's start through each token, and from after it to the group's end: sums, never differences."""
    return _scan_group(g_CK, forward=True, inclusive=True), _scan_group(g_CK, forward=False, inclusive=False)


def _group_sums_backward(_, d: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    return (_scan_group(d[0], forward=False, inclusive=True) + _scan_group(d[1], forward=True, inclusive=False),)


group_sums.defvjp(lambda g_CK: (group_sums(g_CK), None), _group_sums_backward)


def _double_blocks(through_CK: jax.Array, after_CK: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Decays from a block's start through each token and from after it to the end, for blocks twice as long."""
    shape = through_CK.shape
    through, after = (x.reshape(-1, 2, size, shape[1]) for x in (through_CK, after_CK))
    first, second = through[:, :1], through[:, 1:]
    through = jnp.concatenate([first, second * first[:, :, size - 1 :]], axis=1)
    after = jnp.concatenate([after[:, :1] * second[:, :, size - 1 :], after[:, 1:]], axis=1)
    return through.reshape(shape), after.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decayed(passes: Passes, x_CK: jax.Array, exponent_CK: jax.Array, factor_CK: jax.Array) -> jax.Array:
    """x factor, with factor = exp(exponent), rounded as the product that follows rounds it.

    Where a pair's two paths to the tile's middle overlap, the gradients of the decays between cancel. They do so exactly because
    each is made of the rounded values.
    """
    y_CK = x_CK * factor_CK
    return y_CK if passes == "f32" else y_CK.astype(jnp.bfloat16).astype(jnp.float32)


def _decayed_forward(passes: Passes, x_CK: jax.Array, exponent_CK: jax.Array, factor_CK: jax.Array):
    y_CK = _decayed(passes, x_CK, exponent_CK, factor_CK)
    return y_CK, (y_CK, factor_CK)


def _decayed_backward(_: Passes, kept: tuple[jax.Array, jax.Array], d_CK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    y_CK, factor_CK = kept
    return d_CK * factor_CK, d_CK * y_CK, jnp.zeros_like(factor_CK)


_decayed.defvjp(_decayed_forward, _decayed_backward)


def decayed_products(passes: Passes, q_CK: jax.Array | None, k_CK: jax.Array, g_CK: jax.Array):
    """sum_c q_ic k_jc exp(G_ic - G_jc) and the same with k_i, [C, C], zero for i < j; decays through and after each token.

    Report section 2.1 equations 3 and 4. Inside a 16-token tile both tokens refer to its middle (section 2.1.1); for longer
    distances, the two meet at the border of the blocks of 16, 32, ... tokens that part them, where both decays are <= 1.
    """
    chunk = k_CK.shape[0]
    row, lane = broadcasted_iota(jnp.int32, (chunk, chunk), 0), broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    through_sum, after_sum = group_sums(g_CK)
    through, after = jnp.exp(through_sum), jnp.exp(after_sum)
    later = lax.rem(broadcasted_iota(jnp.int32, k_CK.shape, 0), TILE) >= GROUP
    exponent = jnp.where(later, through_sum, -after_sum)
    inverse = jnp.exp(-jnp.where(later, through_sum, after_sum))
    up, down = lax.stop_gradient((jnp.where(later, through, inverse), jnp.where(later, inverse, after)))
    left = [k_CK] if q_CK is None else [k_CK, q_CK]

    in_tile = (lax.div(row, TILE) == lax.div(lane, TILE)) & (row >= lane)
    rows = _stack([_decayed(passes, x, exponent, up) for x in left])
    products = matmul_nt(passes, rows, _decayed(passes, k_CK, -exponent, down))
    products = [jnp.where(in_tile, x, 0.0) for x in _unstack(products, len(left))]
    through, after = _double_blocks(through, after, GROUP)
    size = TILE
    while size < chunk:
        rows = _stack([later_blocks(x * through, size) for x in left])
        part = matmul_nt(passes, rows, k_CK * after)
        mask = below_diagonal(size, chunk // 2, chunk)
        part = [embed_later_blocks(jnp.where(mask, x, 0.0), size) for x in _unstack(part, len(left))]
        products = [x + y for x, y in zip(products, part, strict=True)]
        through, after = _double_blocks(through, after, size)
        size *= 2
    return products[0], products[-1], through, after


def _stack(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=0)


def _unstack(x: jax.Array, count: int) -> list[jax.Array]:
    rows = x.shape[0] // count
    return [x[i * rows : (i + 1) * rows] for i in range(count)]


class _Factors(NamedTuple):
    """A chunk without its state: o = q S + scores U, (I + L) U = beta (v - k S), S' = decay S + k_end^T U."""

    q_CK: jax.Array | None
    k_CK: jax.Array
    v_CV: jax.Array
    k_end_CK: jax.Array
    beta_C1: jax.Array
    lower_CC: jax.Array
    scores_CC: jax.Array
    decay_1K: jax.Array


def _factors(arithmetic: Arithmetic, packing: Packing | None, raw: Raw) -> _Factors:
    q_CK, k_CK = raw.q_CK, normalize(raw.k_CK)
    g_CK = arithmetic.lower_bound * jax.nn.sigmoid(raw.slope_1K * (raw.gate_CK + raw.bias_1K))
    beta_C1 = sigmoid(column(raw.beta_1C))
    if q_CK is not None:
        q_CK = normalize(q_CK) * arithmetic.scale
    if packing is not None:
        g_CK, beta_C1 = g_CK * packing.real_C1, beta_C1 * packing.real_C1
        q_CK = None if q_CK is None else q_CK * packing.real_C1
    kk_CC, qk_CC, through_CK, after_CK = decayed_products(arithmetic.passes, q_CK, k_CK, g_CK)
    chunk = k_CK.shape[0]
    earlier = broadcasted_iota(jnp.int32, (chunk, chunk), 0) > broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    decay_1K = through_CK[chunk - 1 :]
    if packing is not None:
        same = packing.number_C1 == packing.number_1C
        kk_CC, qk_CC = jnp.where(same, kk_CC, 0.0), jnp.where(same, qk_CC, 0.0)
        through_CK, after_CK = through_CK * packing.goes_on_C1, after_CK * packing.reaches_end_C1
        decay_1K = decay_1K * packing.keeps_state_11
    return _Factors(
        q_CK=None if q_CK is None else q_CK * through_CK,
        k_CK=k_CK * through_CK,
        v_CV=raw.v_CV,
        k_end_CK=k_CK * after_CK,
        beta_C1=beta_C1,
        lower_CC=jnp.where(earlier, kk_CC, 0.0) * beta_C1,
        scores_CC=qk_CC,
        decay_1K=decay_1K,
    )


def chunk_step(
    arithmetic: Arithmetic, packing: Packing | None, raws: list[Raw], states: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """One chunk of several heads: outputs [C, V] (none without queries) and the states after it, report section 2.1 eqs 3 to 6.

    A state may have more rows than v has channels: these get no writes of values (a transition's columns).
    """
    passes = arithmetic.passes
    heads = [_factors(arithmetic, packing, raw) for raw in raws]
    reads, rights = [], []
    for head, state_VK in zip(heads, states, strict=True):
        left = [head.k_CK] if head.q_CK is None else [head.k_CK, head.q_CK]
        read = _unstack(matmul_nt(passes, _stack(left), state_VK), len(left))
        v_CV, missing = head.v_CV, state_VK.shape[0] - head.v_CV.shape[1]
        if missing:
            v_CV = jnp.concatenate([v_CV, jnp.zeros((v_CV.shape[0], missing), v_CV.dtype)], axis=1)
        reads.append(read[-1])
        rights.append(head.beta_C1 * (v_CV - read[0]))
    writes = solve(arithmetic.solve_passes, [head.lower_CC for head in heads], rights)
    after = [
        state_VK * head.decay_1K + matmul_tn(passes, write_CV, head.k_end_CK)
        for head, state_VK, write_CV in zip(heads, states, writes, strict=True)
    ]
    if heads[0].q_CK is None:
        return [], after
    return [read + matmul(passes, head.scores_CC, x) for head, read, x in zip(heads, reads, writes, strict=True)], after


def chunk_gradient(
    arithmetic: Arithmetic,
    packing: Packing | None,
    raws: list[Raw],
    states: list[jax.Array],
    d_o: list[jax.Array],
    d_states: list[jax.Array],
) -> tuple[list[Raw], list[jax.Array]]:
    """Gradients of the chunk's inputs and of the states before it, by computing the chunk again."""
    _, pull_back = jax.vjp(partial(chunk_step, arithmetic, packing), raws, states)
    return pull_back((d_o, d_states))
