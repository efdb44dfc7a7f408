"""KDA's forward pass on Hopper: raw inputs to outputs by `prepare` (token-parallel) and `recurrence` (head-parallel).

Legend: B batch, T tokens, H heads, K key channels, V value channels, N chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.hopper.prepare import CHUNK, PADDED, WIDTH, prepare
from pallas_kernels.kda.hopper.recurrence import recurrence
from pallas_kernels.kda.inputs import sigmoid


def chunk_runs(segment_ids_BT: jax.Array) -> jax.Array:
    """Documents as the kernels read them, int32 [B, T], T whole chunks: where in its chunk a token's document begins.

    -1: before the chunk, so the entering state is the document's; else 0 to 63, which may be a padding token before the document's
    first one. Padding has its chunk's last document (that of the state that leaves), less PADDED. Documents are those of
    `inputs.number_documents`, without its running counts, which XLA makes of six kernels in a row; these are two.
    """
    batch, num_tokens = segment_ids_BT.shape
    position_T = jnp.arange(num_tokens, dtype=jnp.int32)
    real_BT = segment_ids_BT >= 0
    edge_N = jnp.arange(num_tokens // CHUNK + 1, dtype=jnp.int32)[:, None] * CHUNK
    last_real_BN = jnp.max(jnp.where(real_BT[:, None] & (position_T < edge_N), position_T, -1), axis=2)  # before every chunk and the end
    last_id_BN = jnp.take_along_axis(segment_ids_BT, jnp.maximum(last_real_BN, 0), axis=1)
    id_BNC, real_BNC = (x.reshape(batch, -1, CHUNK) for x in (segment_ids_BT, real_BT))
    own_BNC = jnp.where(real_BNC, id_BNC, last_id_BN[:, 1:, None])
    # The document begins behind the last earlier token of another id. All is inside the maximum: what follows one is a kernel more.
    i_C = jnp.arange(CHUNK, dtype=jnp.int32)
    earlier_BNCC = (i_C < i_C[:, None]) | ~real_BNC[..., None]
    other_BNCC = real_BNC[:, :, None] & (id_BNC[:, :, None] != own_BNC[..., None])
    before_BNC = (last_real_BN[:, :-1, None] >= 0) & (last_id_BN[:, :-1, None] != own_BNC)
    begin_BNCC = jnp.where(earlier_BNCC & other_BNCC, i_C + 1, jnp.where(before_BNC, 0, -1)[..., None])
    return jnp.max(begin_BNCC - jnp.where(real_BNC, 0, PADDED)[..., None], axis=3).reshape(batch, num_tokens)


def gate_affine(a_log_H: jax.Array, dt_bias_HK: jax.Array) -> jax.Array:
    """`slope` and `shift`, FP32 [H, 2, K]: 2^(gate slope + shift) is exp of minus the gate's sigmoid argument. A head has one slope."""
    slope_HK = jnp.broadcast_to(-math.log2(math.e) * jnp.exp(a_log_H.astype(jnp.float32))[:, None], dt_bias_HK.shape)
    return jnp.stack([slope_HK, slope_HK * dt_bias_HK.astype(jnp.float32)], axis=1)


def pad_to(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Zeros after the end of the named axes, up to the given sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


class Padded(NamedTuple):
    """The inputs as the kernels take them: whole chunks, WIDTH channels.

    `beta_BHT` is the step size, 0 at padding; `affine_H2K` is `gate_affine`'s, `run_BT` None or `chunk_runs`'; the state is
    transposed, FP32, None for zero.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    gate_BTHK: jax.Array
    beta_BHT: jax.Array
    affine_H2K: jax.Array
    run_BT: jax.Array | None
    state_BHVK: jax.Array | None

    def operands(self, *, lower_bound: float, scale: float, interpret) -> dict[str, jax.Array]:
        """The chunk operands."""
        inputs = self.q_BTHK, self.k_BTHK, self.gate_BTHK, self.beta_BHT, self.affine_H2K, self.run_BT
        operands = prepare(*inputs, lower_bound=lower_bound, scale=scale, interpret=interpret)
        return {str(name): array for name, array in operands.items()}


def padded(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV, segment_ids_BT) -> Padded:
    """Zeros after the end of the tokens and channels; the added tokens are padding in the documents' sense."""
    batch, num_tokens = q_BTHK.shape[:2]
    padded_tokens = -(-num_tokens // CHUNK) * CHUNK
    if padded_tokens != num_tokens:
        if segment_ids_BT is None:
            segment_ids_BT = jnp.zeros((batch, num_tokens), jnp.int32)
        segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, padded_tokens - num_tokens)), constant_values=-1)
    wide = {1: padded_tokens, 3: WIDTH}
    beta_BHT = sigmoid(pad_to(beta_BTH, {1: padded_tokens}).transpose(0, 2, 1).astype(jnp.float32))
    if segment_ids_BT is not None:
        beta_BHT = jnp.where(segment_ids_BT[:, None] >= 0, beta_BHT, 0)
    return Padded(
        pad_to(q_BTHK, wide),
        pad_to(k_BTHK, wide),
        pad_to(v_BTHV, wide),
        pad_to(gate_BTHK, wide),
        beta_BHT,
        gate_affine(a_log_H, pad_to(dt_bias_HK, {1: WIDTH})),
        None if segment_ids_BT is None else chunk_runs(segment_ids_BT),
        None if initial_state_BHKV is None else padded_state(initial_state_BHKV),
    )


def padded_state(state_BHKV: jax.Array) -> jax.Array:
    """A state or its gradient as the kernels take it: transposed, FP32, WIDTH channels."""
    return pad_to(state_BHKV.astype(jnp.float32).swapaxes(2, 3), {2: WIDTH, 3: WIDTH})


def kda_forward(
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
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs (bf16) and final state (FP32) of KDA; q, k, v, gate are bf16, K and V at most 128, -5 <= lower_bound < 0.

    Report section 2.1, equations 1 to 6. See `pallas_kernels.kda.kda` for the meaning of the arguments.
    """
    inputs = padded(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, initial_state_BHKV, segment_ids_BT)
    num_tokens, k_width, v_width = q_BTHK.shape[1], q_BTHK.shape[3], v_BTHV.shape[3]
    operands = inputs.operands(lower_bound=lower_bound, scale=k_width**-0.5, interpret=interpret)
    o_BTHV, state_BHVK = recurrence(operands, inputs.v_BTHV, inputs.state_BHVK, interpret=interpret)
    return o_BTHV[:, :num_tokens, :, :v_width], state_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3)


def kda_transition_forward(
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """(M_BHKK, S_zero_start_BHKV) in FP32: the final states of the identity without values, and of zero with them."""
    batch, _, num_heads, k_width = k_BTHK.shape
    v_width = v_BTHV.shape[3]
    # Queries move no state; their place is filled and their products are dropped.
    inputs = padded(k_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, None, segment_ids_BT)
    operands = inputs.operands(lower_bound=lower_bound, scale=k_width**-0.5, interpret=interpret)
    identity_BHKK = padded_state(identities(batch, num_heads, k_width))
    # Zeros as an array: both walks are one kernel.
    _, zero_start_BHVK = recurrence(operands, inputs.v_BTHV, jnp.zeros_like(identity_BHKK), interpret=interpret)
    _, transition_BHKK = recurrence(operands, jnp.zeros_like(inputs.v_BTHV), identity_BHKK, interpret=interpret)
    return (
        transition_BHKK[:, :, :k_width, :k_width].swapaxes(2, 3),
        zero_start_BHVK[:, :, :v_width, :k_width].swapaxes(2, 3),
    )


def identities(batch: int, num_heads: int, width: int) -> jax.Array:
    """One identity matrix per row and head, FP32."""
    return jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (batch, num_heads, width, width))
