"""The token-parallel half of KDA's backward pass on Hopper: gradients of the raw inputs of a chunk.

Legend: B batch, T tokens, H heads, N chunks, C = 64 tokens of a chunk, K = 128 key channels, V = 128 value channels.

In the notation of `prepare` and `recurrence`, with S the state before the chunk and D the gradient of the one after it:

    dA = tril(dO U^T)     dP = -tril(dR U^T, -1), where L = diag(beta) P     dQg = dO S^T     dKg = -dR S^T     dKd = U D^T
    dq_i = sum_j dA_ij k_j 2^(G_i - G_j) + 2^G_i dQg_i
    dk_i = sum_j dP_ij k_j 2^(G_i - G_j) + 2^G_i dKg_i                                       (rows)
         + sum_m (dA_mi q_m + dP_mi k_m) 2^(G_m - G_i) + 2^(G_last - G_i) dKd_i              (columns)

A decay's logarithm gets the rows' k dk and q dq of its token and the later ones, less the pairs' columns' k dk; the columns' last term of
the earlier tokens; and decay times the diagonal of S D^T. Exponents and references are those of `prepare`.

Two warpgroups share a chunk: the first makes dA, the second dP, and each takes 64 of the key channels from there.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.hopper.mma import COLUMN, ROW, WGMMA, load_wide, matmuls, tile, zeros
from pallas_kernels.kda.hopper.prepare import (
    BLOCKS,
    CHUNK,
    HALF,
    L2_EPSILON,
    WIDTH,
    columns_of,
    interval_signs,
    leaving_document,
    rows_of,
    sum_of_rows,
    vector,
)


def _body(
    q_ref, k_ref, gate_ref, run_ref, run_again_ref, affine_ref, signs_ref, sums_ref, zero_ref,
    u_ref, d_r_ref, d_o_ref, states_ref, d_states_ref, decay_ref,
    d_q_ref, d_k_ref, d_gate_ref, d_beta_ref,
    k_all, q_all, gate_union, u_all, left_all, state_union, pairs_all, signs_all, sums_all, row_sums_s, decay_s, loaded_first,
    loaded_second, loaded_last, constants, joined,
    *, num_chunks: int, num_heads: int, num_items: int, items_each: int, bound: float, scale: float, packed: bool,
    interpret: bool,
):  # fmt: skip
    wg = lax.axis_index("wg")
    start = lax.axis_index("blocks") * items_each
    end = jnp.minimum(start + items_each, num_items)
    square = (CHUNK, CHUNK)
    (before_all, after_all), scratch_all = state_union

    def place(item):
        return lax.rem(item, num_chunks), lax.rem(lax.div(item, num_chunks), num_heads), lax.div(item, num_chunks * num_heads)

    def put(ref, value):
        ref[...] = value.astype(jnp.bfloat16)

    def meet(number):
        plgpu.barrier_arrive(joined.at[number])
        plgpu.barrier_wait(joined.at[number])

    # The next chunk's data, in the order in which this one's places become free.
    first_tiles = (states_ref, before_all), (d_states_ref, after_all), (gate_ref, gate_union[0])
    second_tiles = (k_ref, k_all), (q_ref, q_all)
    last_tiles = (d_o_ref, left_all), (d_r_ref, left_all), (u_ref, u_all)

    def fetch(item, tiles, loaded):
        n, h, b = place(item)
        for number, (ref, target) in enumerate(tiles):
            source = ref.at[b, h, n] if ref is states_ref or ref is d_states_ref else ref.at[b, pl.ds(n * CHUNK, CHUNK), h]
            plgpu.copy_gmem_to_smem(source, target.at[number if target is left_all else 0], loaded)

    @pl.when(wg == 0)
    def _start():
        plgpu.copy_gmem_to_smem(signs_ref, signs_all, constants)
        plgpu.copy_gmem_to_smem(sums_ref, sums_all.at[0], constants)
        fetch(start, last_tiles, loaded_last)
        fetch(start, first_tiles, loaded_first)
        fetch(start, second_tiles, loaded_second)

    plgpu.barrier_wait(constants)

    def numbers(zero, layout):
        return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) + zero

    def chunk(item, _):
        n, h, b = place(item)
        tokens = pl.ds(n * CHUNK, CHUNK)
        # Made with a zero that was just read, addresses, descriptors and masks are made here; else before the loop, and spilled.
        zero = zero_ref[0]
        own = wg + zero
        k_s, q_s, raw_s, g_s, u_s, before_s, after_s, sums_s = (
            ref.at[zero] for ref in (k_all, q_all, *gate_union, u_all, before_all, after_all, sums_all)
        )
        reference_signs, far_signs, start_signs, end_signs = (signs_all.at[zero + i] for i in range(4))
        mine = pl.ds(own * HALF, HALF)

        def scratch(number):
            return scratch_all.at[4 * own + number]

        def at(number):
            """A traced index: among traced ones, a literal of an operand does not lower."""
            return zero + number

        rows, columns = rows_of(numbers(zero, ROW), square), columns_of(numbers(zero, COLUMN) + wg, square)
        keep = columns <= rows
        if packed:
            begin, last = vector(run_ref.at[b, tokens], ROW), leaving_document(run_ref, b, n)
            real_row = begin > -2
            same = rows_of(begin, square) == columns_of(vector(run_again_ref.at[b, tokens], COLUMN), square)
            keep = keep & same & rows_of(real_row, square)

            @pl.when(wg == 0)
            def _sums():
                put(sums_s, jnp.where(same & (columns >= rows), 1.0, 0.0))

        plgpu.barrier_wait(loaded_last)

        # What needs S and D.
        [pairs] = matmuls([(zeros(*square), [(left_all.at[own], u_s.transpose((1, 0)))])], interpret)
        put(pairs_all.at[own], jnp.where(keep, pairs * jnp.where(wg == 0, 1.0, -1.0), 0.0))
        plgpu.barrier_wait(loaded_first)
        products = [(left_all.at[at(0)], before_s), (left_all.at[at(1)], before_s), (u_s, after_s)]
        products = matmuls([(zeros(*square), [(left, right.at[:, mine])]) for left, right in products], interpret)
        d_q_grown, d_k_grown, d_k_left = (x.astype(jnp.bfloat16) for x in products)

        def whole(ref):
            return load_wide(ref, interpret)

        def half(ref):
            return whole(ref.at[:, mine])

        def columns_by_rows(ref):
            return load_wide(ref.transpose((1, 0)), interpret)

        diagonal = 0.0
        for i in range(2):
            values = pl.ds(i * HALF, HALF)
            diagonal = diagonal + sum_of_rows(columns_by_rows(before_s.at[values, mine]) * columns_by_rows(after_s.at[values, mine]))
        decay_s.at[own][...] = diagonal * vector(decay_ref.at[b, h, n, mine], ROW)
        plgpu.barrier_wait(loaded_second)
        k, q = half(k_s), half(q_s)
        for number, product in enumerate((k * k, q * q, half(u_s) * half(left_all.at[1]))):
            row_sums_s.at[2 * number + own][...] = sum_of_rows(product)
        raw = half(raw_s)
        slope, shift = affine_ref[h, 0, 0], vector(affine_ref.at[h, 1, mine], COLUMN)
        odds = jnp.exp2(jnp.minimum(raw * slope + columns_of(shift, square), 100.0))
        root = lax.rsqrt(1.0 + odds)
        opened = root * root
        g = opened * (bound * math.log2(math.e))
        steep = opened * (opened * odds)  # in this order: the square alone can underflow
        if packed:
            real = rows_of(jnp.where(real_row, 1.0, 0.0), square)
            g, steep = g * real, steep * real
        g_s.at[:, mine][...] = g.astype(jnp.float16)
        steep = steep.astype(jnp.bfloat16)
        plgpu.commit_smem()
        meet(0)
        # U, dR and dO have been read; their places hold what would fill the registers.
        grown_s, ended_s, steep_s = left_all.at[0, :, mine], left_all.at[1, :, mine], u_s.at[:, mine]
        for ref, value in ((grown_s, d_k_grown), (ended_s, d_k_left), (steep_s, steep)):
            ref[...] = value

        def total(number):
            return plgpu.load(row_sums_s.at[at(2 * number)], layout=ROW) + plgpu.load(row_sums_s.at[at(2 * number + 1)], layout=ROW)

        @pl.when(wg == 0)
        def _beta():
            d_beta_ref.at[b, h, tokens][...] = total(2)

        k_scale, q_scale = lax.rsqrt(total(0) + L2_EPSILON), lax.rsqrt(total(1) + L2_EPSILON) * scale

        def key():
            return half(k_s) * rows_of(k_scale, square)

        def query():
            return half(q_s) * rows_of(q_scale, square)

        def exponents(signs):
            return zeros(*square), [(signs, g_s.at[:, mine])]

        near_s, far_s, q_up_s, k_up_s = (scratch(i) for i in range(4))
        far, relative = matmuls([exponents(far_signs), exponents(reference_signs)], interpret)
        put(far_s, key() * jnp.exp2(far))
        put(near_s, key() * jnp.exp2(-relative))
        up = jnp.exp2(relative)
        put(q_up_s, query() * up)
        put(k_up_s, key() * up)
        plgpu.commit_smem()

        # The pairs' parts must cancel in the sum for the decays: rows and columns multiply the same rounded factors.
        def parts(vector):
            early = vector < 32
            return [jnp.where(early, *pair).astype(jnp.bfloat16) for pair in ((1.0, 0.0), (0.0, 1.0))]

        def row_product(i):
            """Rows of the first half meet `near`, those of the second half `far`."""
            left = plgpu.load(pairs_all.at[at(i)], layout=WGMMA)
            early, late = (rows_of(part, square) for part in parts(numbers(zero, ROW)))
            return zeros(*square), [(left * early, near_s), (left * late, far_s)]

        inside, grown = matmuls([row_product(0), exponents(start_signs)], interpret)
        grown = jnp.exp2(grown)
        if packed:
            grown = grown * rows_of(jnp.where((begin < 0) & real_row, 1.0, 0.0), square)
        entered, q = grown * d_q_grown.astype(jnp.float32), query()
        d_q = inside * up + entered
        logs = whole(q_up_s) * inside + q * entered
        row_sums_s.at[own + 6][...] = sum_of_rows(q * d_q)
        d_q = d_q.astype(jnp.bfloat16)
        [inside], entered = matmuls([row_product(1)], interpret), -grown * whole(grown_s)  # R has -Kg S
        logs = logs + whole(k_up_s) * inside + key() * entered
        d_k = inside * up + entered
        grown_s[...] = d_q

        def column_product(half):
            """What rows of one half send to all columns."""
            mask = columns_of(parts(numbers(zero, COLUMN))[half], square)
            lefts = [plgpu.load(pairs_all.at[at(i)].transpose((1, 0)), layout=WGMMA) * mask for i in (0, 1)]
            return zeros(*square), list(zip(lefts, (q_up_s, k_up_s), strict=True))

        for half_number, signs, sign, factor_s in ((0, reference_signs, -1.0, near_s), (1, far_signs, 1.0, far_s)):
            received, exponent = matmuls([column_product(half_number), exponents(signs)], interpret)
            d_k = d_k + jnp.exp2(sign * exponent) * received
            logs = logs - whole(factor_s) * received
        k = key()
        [left] = matmuls([exponents(end_signs)], interpret)
        left = jnp.exp2(left)
        if packed:
            left = left * rows_of(jnp.where(begin == last, 1.0, 0.0), square)
        ended = left * whole(ended_s)
        d_k = d_k + ended
        row_sums_s.at[own + 8][...] = sum_of_rows(k * d_k)

        # Sums over tokens, in two bf16 parts.
        plgpu.commit_smem()  # every warp's product has read the scratch memory
        ended = k * ended
        for number, value in ((0, logs), (2, ended)):
            high = lax.optimization_barrier(value.astype(jnp.bfloat16))
            put(scratch(number), high)
            put(scratch(number + 1), value - high.astype(jnp.float32))
        plgpu.commit_smem()
        init = columns_of(plgpu.load(decay_s.at[own], layout=COLUMN), square) - ended  # earlier tokens only: without the token itself
        signs = [sums_s, sums_s, sums_s.transpose((1, 0)), sums_s.transpose((1, 0))]
        [d_g] = matmuls([(init, [(sign, scratch(i)) for i, sign in enumerate(signs)])], interpret)
        d_gate = d_g * whole(steep_s) * (affine_ref[h, 0, 0] * (-bound * math.log(2)))
        meet(1)
        more = (wg == 0) & (item + 1 < end)

        @pl.when(more)
        def _first():
            fetch(item + 1, first_tiles, loaded_first)

        put(grown_s, (whole(grown_s) - query() * rows_of(total(3) * scale**-2, square)) * rows_of(q_scale, square))
        put(ended_s, (d_k - key() * rows_of(total(4), square)) * rows_of(k_scale, square))
        put(steep_s, d_gate)
        plgpu.commit_smem()
        meet(2)

        @pl.when(more)
        def _second():
            fetch(item + 1, second_tiles, loaded_second)

        @pl.when(wg == 0)
        def _store():
            for source, ref in ((left_all.at[0], d_q_ref), (left_all.at[1], d_k_ref), (u_all.at[0], d_gate_ref)):
                plgpu.copy_smem_to_gmem(source, ref.at[b, tokens, h])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(more)
        def _last():
            fetch(item + 1, last_tiles, loaded_last)

    lax.fori_loop(start, end, chunk, None)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("lower_bound", "scale", "interpret"))  # lowered once for all the layers that call it
def input_gradients(
    q_BTHK, k_BTHK, gate_BTHK, affine_H2K, run_BT, u_BTHV, d_r_BTHV, d_o_BTHV, states, d_states, decay,
    *, lower_bound: float, scale: float, interpret=None,
):  # fmt: skip
    """Gradients of q, k and gate (bf16, like them), and per token the sum of dR U, [B, H, T] in FP32.

    That sum times (1 - beta) / beta is the gradient of beta's logit. `states`, `d_states` [B, H, N, V, K] come from `recurrence`
    and `reverse_recurrence`, `decay` [B, H, N, K] from `prepare`, `affine` and `run` are as there.
    """
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    num_chunks = num_tokens // CHUNK
    packed = run_BT is not None
    if not packed:
        run_BT = np.zeros((1, 1), np.int32)  # not read; a constant, which no kernel fills
    bf16, fp16 = jnp.bfloat16, jnp.float16
    num_items = num_chunks * num_heads * batch
    items_each = -(-num_items // BLOCKS)
    body = functools.partial(
        _body,
        num_chunks=num_chunks,
        num_heads=num_heads,
        num_items=num_items,
        items_each=items_each,
        bound=lower_bound,
        scale=scale,
        packed=packed,
        interpret=interpret is not None,
    )
    chunk, square = (CHUNK, WIDTH), (CHUNK, CHUNK)
    like_inputs = jax.ShapeDtypeStruct(q_BTHK.shape, bf16)
    kernel = plgpu.kernel(
        body,
        out_type=(like_inputs, like_inputs, like_inputs, jax.ShapeDtypeStruct((batch, num_heads, num_tokens), jnp.float32)),
        scratch_types=(
            tile((1, *chunk), bf16),
            tile((1, *chunk), bf16),
            plgpu.RefUnion(tile((1, *chunk), bf16), tile((1, *chunk), fp16)),
            tile((1, *chunk), bf16),
            tile((2, *chunk), bf16),
            plgpu.RefUnion((tile((1, WIDTH, WIDTH), bf16), tile((1, WIDTH, WIDTH), bf16)), tile((8, *square), bf16)),
            tile((2, *square), bf16),
            tile((4, *square), fp16),
            tile((1, *square), bf16),
            plgpu.SMEM((10, CHUNK), jnp.float32),
            plgpu.SMEM((2, HALF), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=3),
        ),
        grid=(-(-num_items // items_each),),
        grid_names=("blocks",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    constants = jnp.asarray(interval_signs(), fp16), jnp.asarray(np.triu(np.ones(square)), bf16), jnp.zeros(1, jnp.int32)
    # Vectors needed along rows and along columns come in twice: one load in two layouts has no solution for the compiler.
    given = q_BTHK, k_BTHK, gate_BTHK, run_BT, run_BT, affine_H2K, *constants
    return kernel(*given, u_BTHV, d_r_BTHV, d_o_BTHV, states, d_states, decay)
