"""KDA chunk by chunk: few large matmuls for all chunks at once, and a short scan that carries the state.

B batch, T tokens, N chunks, C tokens of a chunk, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.inputs import Documents, Prepared, compute_dtype, number_documents, prepare
from pallas_kernels.kda.matmul import HIGHEST, MatmulStyle, matmul, matmul_nt, matmul_tn, transposed
from pallas_kernels.kda.tiles import TILE, decayed_products, unit_lower_inverse
from pallas_kernels.target import target


class _Static(NamedTuple):
    """What is fixed at trace time (hashable)."""

    lower_bound: float
    chunk_size: int
    style: MatmulStyle


class _Raw(NamedTuple):
    """The inputs as given."""

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    gate_BTHK: jax.Array
    beta_BTH: jax.Array
    a_log_H: jax.Array
    dt_bias_HK: jax.Array


class _Chunks(NamedTuple):
    """All chunks in the WY form: o = q S + scores (u - w S) and S' = decay S + k_end^T (u - w S)."""

    q_NBHCK: jax.Array
    scores_NBHCC: jax.Array
    w_NBHCK: jax.Array
    u_NBHCV: jax.Array
    k_end_NBHCK: jax.Array
    decay_NBHK: jax.Array


def default_chunk_size(tokens: int, platform: str) -> int:
    """16 on CPUs, where it was fastest for K of 32 and 64; 64 on accelerators, or the fewest doubled tiles that hold the row."""
    size = TILE
    while platform != "cpu" and size < min(64, tokens):
        size *= 2
    return size


def kda_chunked(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    initial_state_BHKV: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention in the chunk form, report section 2.1 equations 3 to 6.

    Arguments and results as in `pallas_kernels.kda.kda`; `chunk_size` is 16 times a power of two. Memory is linear in
    T: the backward pass keeps the inputs and one state per chunk and computes the rest again.
    """
    batch, _, heads, width = k_BTHK.shape
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH)
    if initial_state_BHKV is None:
        initial_state_BHKV = jnp.zeros((batch, heads, width, v_BTHV.shape[-1]), dtype)
    documents = None if segment_ids_BT is None else number_documents(segment_ids_BT)
    static = _static(v_BTHV, lower_bound, chunk_size)
    raw = _Raw(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK)
    return _chunked(static, raw, initial_state_BHKV.astype(dtype), documents)


def chunk_transition(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What a stretch of tokens does to any incoming state: S_out = M S_in + S_zero_start, report section 5.1.2 equation 17.

    Returns (M_BHKK, S_zero_start_BHKV) in the compute dtype. M is zero where a document starts inside the stretch after another
    one's tokens. Differentiable; the backward pass keeps the inputs only.
    """
    documents = None if segment_ids_BT is None else number_documents(segment_ids_BT)
    static = _static(v_BTHV, lower_bound, chunk_size)

    @jax.checkpoint
    def transition(raw: _Raw) -> tuple[jax.Array, jax.Array]:
        chunks = _wy(static, documents, raw)
        batch, _, heads, width = raw.k_BTHK.shape
        identity_BHKK = jnp.broadcast_to(jnp.eye(width, dtype=chunks.w_NBHCK.dtype), (batch, heads, width, width))
        zero_BHKV = jnp.zeros((batch, heads, width, raw.v_BTHV.shape[-1]), identity_BHKK.dtype)
        # The identity's response is M: its columns ride in the scan beside those of the zero state, without writes.
        u_NBHCKV = jnp.concatenate([jnp.zeros_like(chunks.w_NBHCK), chunks.u_NBHCV], axis=-1)
        start_BHKKV = jnp.concatenate([identity_BHKK, zero_BHKV], axis=-1)
        final_BHKKV, _ = _scan_states(static, chunks._replace(u_NBHCV=u_NBHCKV), start_BHKKV)
        return final_BHKKV[..., :width], final_BHKKV[..., width:]

    # Queries move no state; their place is filled and their products are dropped.
    return transition(_Raw(k_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK))


def _static(v_BTHV: jax.Array, lower_bound: float, chunk_size: int | None) -> _Static:
    # 16-bit inputs: one pass of the matmul unit on float32 operands (TF32 on GPUs, BF16 on TPUs) with float32 accumulation rounds
    # no more than the inputs are. The inverse and the sums of log decays are at HIGHEST in any case.
    precision = jax.lax.Precision.DEFAULT if v_BTHV.dtype.itemsize == 2 else HIGHEST
    platform = target().platform
    size = default_chunk_size(v_BTHV.shape[1], platform) if chunk_size is None else chunk_size
    if size < TILE or size % TILE or (size // TILE) & (size // TILE - 1):
        raise ValueError(f"chunk_size must be {TILE} times a power of two, got {chunk_size}")
    return _Static(float(lower_bound), size, MatmulStyle(precision, transpose_first=platform == "cpu"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: _Static, raw: _Raw, initial_state_BHKV: jax.Array, documents: Documents | None) -> tuple[jax.Array, jax.Array]:
    return _chunked_forward(static, raw, initial_state_BHKV, documents)[0]


def _chunked_forward(
    static: _Static, raw: _Raw, initial_state_BHKV: jax.Array, documents: Documents | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[_Raw, Documents | None, jax.Array]]:
    chunks = _wy(static, documents, raw)
    final_state_BHKV, (state_NBHKV, write_NBHCV) = _scan_states(static, chunks, initial_state_BHKV)
    o_NBHCV = matmul(static.style, chunks.q_NBHCK, state_NBHKV) + matmul(static.style, chunks.scores_NBHCC, write_NBHCV)
    o_BTHV = _from_chunks(o_NBHCV, raw.v_BTHV.shape[1]).astype(raw.v_BTHV.dtype)
    return (o_BTHV, final_state_BHKV), (raw, documents, state_NBHKV)


def _chunked_backward(
    static: _Static, residuals: tuple[_Raw, Documents | None, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[_Raw, jax.Array, None]:
    raw, documents, state_NBHKV = residuals
    d_o_BTHV, d_final_BHKV = cotangents
    chunks, pull_back = jax.vjp(partial(_wy, static, documents), raw)
    d_o_NBHCV = _to_chunks(d_o_BTHV.astype(state_NBHKV.dtype), static.chunk_size)

    write_NBHCV = chunks.u_NBHCV - matmul(static.style, chunks.w_NBHCK, state_NBHKV)
    d_write_NBHCV = matmul_tn(static.style, chunks.scores_NBHCC, d_o_NBHCV)
    d_read_NBHKV = matmul_tn(static.style, chunks.q_NBHCK, d_o_NBHCV)

    def step(d_after_BHKV, chunk):
        d_read_BHKV, d_write_BHCV, k_end_BHCK, w_BHKC, decay_BHK = chunk
        d_write_BHCV += matmul(static.style, k_end_BHCK, d_after_BHKV)
        d_before_BHKV = decay_BHK[..., None] * d_after_BHKV + d_read_BHKV - matmul(static.style, w_BHKC, d_write_BHCV)
        return d_before_BHKV, (d_after_BHKV, d_write_BHCV)

    steps = (d_read_NBHKV, d_write_NBHCV, chunks.k_end_NBHCK, transposed(static.style, chunks.w_NBHCK), chunks.decay_NBHK)
    d_initial_BHKV, (d_after_NBHKV, d_write_NBHCV) = jax.lax.scan(step, d_final_BHKV, steps, reverse=True)
    d_chunks = _Chunks(
        q_NBHCK=matmul_nt(static.style, d_o_NBHCV, state_NBHKV),
        scores_NBHCC=matmul_nt(static.style, d_o_NBHCV, write_NBHCV),
        w_NBHCK=-matmul_nt(static.style, d_write_NBHCV, state_NBHKV),
        u_NBHCV=d_write_NBHCV,
        k_end_NBHCK=matmul_nt(static.style, write_NBHCV, d_after_NBHKV),
        decay_NBHK=jnp.sum(state_NBHKV * d_after_NBHKV, axis=-1),
    )
    (d_raw,) = pull_back(d_chunks)
    return d_raw, d_initial_BHKV, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _wy(static: _Static, documents: Documents | None, raw: _Raw) -> _Chunks:
    """Everything that needs no state, for all chunks at once."""
    size = static.chunk_size
    real_BT = None if documents is None else documents.real_BT
    prepared = prepare(*raw, lower_bound=static.lower_bound, real_BT=real_BT, dtype=compute_dtype(*raw[:5]))
    q_NBHCK, k_NBHCK, v_NBHCV, g_NBHCK, beta_NBHC = Prepared(*(_to_chunks(x, size) for x in prepared))
    qk, kk, q_start, k_start, k_end, decay = decayed_products(q_NBHCK, k_NBHCK, g_NBHCK, static.style)
    pairs = jnp.tril(jnp.ones((size, size), bool))
    earlier = jnp.tril(pairs, -1)
    if documents is not None:
        number_NBC, before_NB = _number_chunks(documents, size)
        goes_on_NBC = (number_NBC == before_NB[..., None])[:, :, None, :, None]
        q_start, k_start = jnp.where(goes_on_NBC, q_start, 0), jnp.where(goes_on_NBC, k_start, 0)
        last_NB = number_NBC[..., -1]
        k_end = jnp.where((number_NBC == last_NB[..., None])[:, :, None, :, None], k_end, 0)
        decay = jnp.where((last_NB == before_NB)[:, :, None, None], decay, 0)
        same = (number_NBC[..., :, None] == number_NBC[..., None, :])[:, :, None]
        pairs, earlier = pairs & same, earlier & same
    solve = unit_lower_inverse(static.style, jnp.where(earlier, kk, 0) * beta_NBHC[..., None]) * beta_NBHC[..., None, :]
    return _Chunks(
        q_NBHCK=q_start,
        scores_NBHCC=jnp.where(pairs, qk, 0),
        w_NBHCK=matmul(static.style, solve, k_start),
        u_NBHCV=matmul(static.style, solve, v_NBHCV),
        k_end_NBHCK=k_end,
        decay_NBHK=decay,
    )


def _number_chunks(documents: Documents, size: int) -> tuple[jax.Array, jax.Array]:
    """Document numbers by chunk [N, B, C], and the number just before each chunk [N, B] (0 before the row)."""
    number_BT = documents.number_BT
    batch, tokens = number_BT.shape
    number_BNC = jnp.pad(number_BT, ((0, 0), (0, -tokens % size)), mode="edge").reshape(batch, -1, size)
    before_BN = jnp.pad(number_BNC[:, :-1, -1], ((0, 0), (1, 0)))
    return jnp.moveaxis(number_BNC, 1, 0), before_BN.T


def _scan_states(static: _Static, chunks: _Chunks, initial_state_BHKV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The state after the last chunk; before each chunk the state [N, B, H, K, V], and in it the writes u - w S [N, B, H, C, V]."""

    def step(state_BHKV, chunk):
        w_BHCK, u_BHCV, k_end_BHKC, decay_BHK = chunk
        write_BHCV = u_BHCV - matmul(static.style, w_BHCK, state_BHKV)
        return decay_BHK[..., None] * state_BHKV + matmul(static.style, k_end_BHKC, write_BHCV), (state_BHKV, write_BHCV)

    steps = (chunks.w_NBHCK, chunks.u_NBHCV, transposed(static.style, chunks.k_end_NBHCK), chunks.decay_NBHK)
    return jax.lax.scan(step, initial_state_BHKV, steps)


def _to_chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, H, ...] -> [N, B, H, C, ...], zeros after the last token (which leave states as they are)."""
    batch, tokens, heads = x.shape[:3]
    x = jnp.pad(x, ((0, 0), (0, -tokens % size)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, -1, size, heads, *x.shape[3:]), (1, 3), (0, 2))


def _from_chunks(x_NBHCV: jax.Array, tokens: int) -> jax.Array:
    chunks, batch, heads, size, width = x_NBHCV.shape
    return jnp.moveaxis(x_NBHCV, (0, 2), (1, 3)).reshape(batch, chunks * size, heads, width)[:, :tokens]
