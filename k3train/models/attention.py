"""Causal softmax attention inside documents, in XLA.

Legend: B batch, T query tokens, S key tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from k3train.models.norms import wide

DIRECT_LIMIT = 1024  # up to here all logits of a row are held at once


def causal_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    *,
    scale: float,
    segment_ids_BT: jax.Array | None = None,
    query_block: int = 256,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * q k^T + causal and document mask) v, softmax in at least float32 (report eq. 7).

    Returns the output [B, T, H, V] in at least float32 (the report keeps it so up to the gate) and the largest signed
    logit of each head [H], which carries no gradient. Tokens of segment -1 neither give nor get anything. Rows longer
    than `DIRECT_LIMIT` run in blocks of queries whose logits are recomputed in the backward pass.
    """
    batch, tokens = q_BTHK.shape[:2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((batch, tokens), jnp.int32)
    positions_T = jnp.arange(tokens, dtype=jnp.int32)
    attend = partial(_attend, k_BSHK=k_BTHK, v_BSHV=v_BTHV, key_segments_BS=segment_ids_BT, key_positions_S=positions_T, scale=scale)
    if tokens <= DIRECT_LIMIT:
        return attend(q_BTHK, segment_ids_BT, positions_T)

    blocks = -(-tokens // query_block)
    padding = blocks * query_block - tokens
    q_padded = jnp.pad(q_BTHK, ((0, 0), (0, padding), (0, 0), (0, 0)))
    segments_padded = jnp.pad(segment_ids_BT, ((0, 0), (0, padding)), constant_values=-1)
    q_blocks = jnp.moveaxis(q_padded.reshape(batch, blocks, query_block, *q_BTHK.shape[2:]), 1, 0)
    segment_blocks = jnp.moveaxis(segments_padded.reshape(batch, blocks, query_block), 1, 0)
    position_blocks = jnp.arange(blocks * query_block, dtype=jnp.int32).reshape(blocks, query_block)
    o_blocks, max_blocks = jax.lax.map(jax.checkpoint(lambda block: attend(*block)), (q_blocks, segment_blocks, position_blocks))
    o_BTHV = jnp.moveaxis(o_blocks, 0, 1).reshape(batch, blocks * query_block, *v_BTHV.shape[2:])[:, :tokens]
    return o_BTHV, jnp.max(max_blocks, axis=0)


def _attend(q_BTHK, query_segments_BT, query_positions_T, *, k_BSHK, v_BSHV, key_segments_BS, key_positions_S, scale):
    dtype = wide(q_BTHK.dtype)
    logits_BHTS = scale * jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=dtype)
    seen_BTS = query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    seen_BTS &= (query_positions_T[:, None] >= key_positions_S[None, :]) & (query_segments_BT >= 0)[:, :, None]
    logits_BHTS = jnp.where(seen_BTS[:, None], logits_BHTS, jnp.finfo(dtype).min)
    p_BHTS = jax.nn.softmax(logits_BHTS, axis=-1)
    o_BTHV = jnp.einsum("bhts,bshv->bthv", p_BHTS.astype(v_BSHV.dtype), v_BSHV, preferred_element_type=dtype)
    # a padded query sees nothing, its softmax is uniform: zero it
    o_BTHV *= (query_segments_BT >= 0)[..., None, None].astype(dtype)
    return o_BTHV, jax.lax.stop_gradient(jnp.max(logits_BHTS, axis=(0, 2, 3)))
