"""KDA on TPU: one Mosaic kernel for the forward pass, one for the backward pass, and the transition of a stretch of tokens.

Legend: B batch, T tokens, H heads, P head groups of G heads, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.inputs import number_documents
from pallas_kernels.kda.tpu.backward import backward
from pallas_kernels.kda.tpu.blocks import CHUNK, CHUNKS_PER_BLOCK, LANES, Geometry
from pallas_kernels.kda.tpu.chunk import Arithmetic
from pallas_kernels.kda.tpu.forward import Operands, forward

__all__ = ["kda_tpu", "transition_tpu", "unsupported_reason"]

_MAX_WIDTH = 256


def unsupported_reason(*arrays: jax.Array) -> str | None:
    """Why these token inputs cannot go through the kernels, or None if they can. Looks at shapes and dtypes only."""
    for array in arrays:
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"an input is {array.dtype}, the kernels take bfloat16 and float32"
        if array.ndim == 4 and array.shape[-1] > _MAX_WIDTH:
            return f"an input has {array.shape[-1]} channels per head, the kernels take at most {_MAX_WIDTH}"
    return None


def kda_tpu(
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
    chunk: int = CHUNK,
    chunks_per_block: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention by Mosaic TPU kernels, report section 2.1 equations 1 to 6.

    Arguments and results as in `pallas_kernels.kda.kda`. If q, k, v and gate are all bfloat16, products run in one BF16 pass (the
    triangular solve in about 16 bits); otherwise in full float32. The backward pass keeps the inputs and one state per block. `chunk`
    is 16 times a power of two (128 on a chip); `interpret` is `pltpu.InterpretParams` for runs without a TPU.

    Raises:
        ValueError: the kernels do not take these dtypes or widths.
    """
    return _run(
        q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound, segment_ids_BT, initial_state_BHKV,
        chunk, chunks_per_block, interpret,
    )  # fmt: skip


def transition_tpu(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    chunk: int = CHUNK,
    chunks_per_block: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """What a stretch of tokens does to any incoming state, S_out = M S_in + S_zero_start: report section 5.1.2 equation 17.

    Arguments and results as in `pallas_kernels.kda.chunk_transition`: (M_BHKK, S_zero_start_BHKV), float32, differentiable. M is the
    identity's response to the tokens; its columns walk with the state, without writes.
    """
    batch, _, heads, width = k_BTHK.shape
    zero_BHKV = jnp.zeros((batch, heads, width, v_BTHV.shape[-1]), jnp.float32)
    identity_BHKK = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (batch, heads, width, width))
    return _run(
        None, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound, segment_ids_BT, (zero_BHKV, identity_BHKK),
        chunk, chunks_per_block, interpret,
    )  # fmt: skip


def _run(q, k, v, gate, beta, a_log, dt_bias, lower_bound, segment_ids, state, chunk, chunks_per_block, interpret):
    """Brings the inputs into the kernels' form, runs them and brings the results back."""
    tokens_like = [x for x in (q, k, v, gate, beta) if x is not None]
    reason = unsupported_reason(*tokens_like)
    if reason is not None:
        raise ValueError(f"KDA on TPU: {reason}")
    batch, tokens, heads, key_width = k.shape
    value_width, f32 = v.shape[-1], jnp.float32
    if chunks_per_block is None:
        chunks_per_block = min(CHUNKS_PER_BLOCK, -(-tokens // chunk))
    transition = q is None
    geometry = Geometry(
        arithmetic=Arithmetic(float(lower_bound), key_width**-0.5, any(x.dtype == f32 for x in tokens_like[:-1])),
        batch=batch,
        tokens=tokens,
        heads=heads,
        key_width=-(-key_width // LANES) * LANES,
        value_width=-(-value_width // LANES) * LANES,
        chunk=chunk,
        chunks_per_block=chunks_per_block,
        packed=segment_ids is not None or tokens % (chunk * chunks_per_block) != 0,
        transition=transition,
        interpret=interpret,
    )
    g = geometry

    def joined(x: jax.Array, width: int) -> jax.Array:
        """[B, T, H, ...] -> [B, T, H width]; rows shorter than a block are padded to one."""
        x = _pad(x, {1: max(tokens, g.block), 3: width})
        return x.reshape(batch, -1, heads * width)

    def transposed(state: jax.Array, rows: int) -> jax.Array:
        return _pad(jnp.swapaxes(state.astype(f32), 2, 3), {2: rows, 3: g.key_width})

    if transition:
        zero, identity = state
        state = jnp.concatenate([transposed(zero, g.value_width), transposed(identity, g.key_width)], axis=2)
    elif state is None:
        state = jnp.zeros((batch, heads, g.state_rows, g.key_width), f32)
    else:
        state = transposed(state, g.value_width)
    beta = _pad(beta.astype(f32), {1: g.blocks * g.block}).reshape(batch, -1, chunk, g.groups, g.group)
    slope = jnp.broadcast_to(jnp.exp(a_log.astype(f32))[:, None], (heads, g.key_width))
    operands = Operands(
        q=None if q is None else joined(q, g.key_width),
        k=joined(k, g.key_width),
        v=joined(v, g.value_width),
        gate=joined(gate, g.key_width),
        beta=jnp.transpose(beta, (0, 3, 1, 4, 2)),
        slope=slope.reshape(g.groups, g.group, -1),
        bias=_pad(dt_bias.astype(f32), {1: g.key_width}).reshape(g.groups, g.group, -1),
        code=_codes(segment_ids, g) if g.packed else None,
        state=state,
    )
    o, final = _kernels(geometry, operands)
    final = jnp.swapaxes(final, 2, 3)[:, :, :key_width]
    if transition:
        return final[..., g.value_width : g.value_width + key_width], final[..., :value_width]
    return o.reshape(batch, -1, heads, g.value_width)[:, :tokens, :, :value_width], final[..., :value_width]


def _codes(segment_ids_BT: jax.Array | None, geometry: Geometry) -> jax.Array:
    """Documents as `chunk.unpack` reads them, [B, 1, N block]: numbers from the document whose state enters the chunk."""
    g = geometry
    tokens = g.blocks * g.block
    if segment_ids_BT is None:
        row_T = np.where(np.arange(tokens) < g.tokens, 0, -1).astype(np.float32)
        return jnp.broadcast_to(row_T, (g.batch, 1, tokens))
    segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, tokens - g.tokens)), constant_values=-1)
    number_BT, real_BT = number_documents(segment_ids_BT)
    number_BNC = number_BT.reshape(g.batch, -1, g.chunk)
    before_BN = jnp.pad(number_BNC[:, :-1, -1], ((0, 0), (1, 0)))
    number_BT = (number_BNC - before_BN[..., None]).reshape(g.batch, tokens)
    return jnp.where(real_BT, number_BT, -1 - number_BT).astype(jnp.float32)[:, None]


def _pad(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Zeros after the end of the named axes, up to the given sizes; axes that x lacks are passed over."""
    widths = [(0, max(sizes.get(axis, size) - size, 0)) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(geometry: Geometry, operands: Operands) -> tuple[jax.Array | None, jax.Array]:
    results = forward(geometry, operands, keep_states=False)
    return results.get("o"), results["final"]


def _kernels_forward(geometry: Geometry, operands: Operands):
    results = forward(geometry, operands, keep_states=True)
    return (results.get("o"), results["final"]), (operands, results["states"])


def _kernels_backward(geometry: Geometry, kept, cotangents) -> tuple[Operands]:
    operands, states = kept
    d = backward(geometry, operands, states, *cotangents)
    return (
        Operands(
            q=d.get("d_q"),
            k=d["d_k"],
            v=d["d_v"],
            gate=d["d_gate"],
            beta=d["d_beta"],
            slope=d["d_slope"].sum(0),
            bias=d["d_bias"].sum(0),
            code=None if operands.code is None else jnp.zeros_like(operands.code),
            state=d["d_initial"],
        ),
    )


_kernels.defvjp(_kernels_forward, _kernels_backward)
