"""Causal softmax attention inside documents, in XLA; over whole rows, and over kept latents.

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


def latent_attention(
    q_BTHK: jax.Array,
    latent_BSC: jax.Array,
    shared_key_BSP: jax.Array,
    k_up_CHN: jax.Array,
    v_up_CHV: jax.Array,
    *,
    scale: float,
    seen_BTS: jax.Array,
) -> jax.Array:
    """Attention over the keys (k_up c, shared key) and the values v_up c of kept latents c, without expanding them.

    The two products change places: q k_up meets the latents, and v_up their weighted sum. Per query this costs S (2 C + P) a head,
    and H C (N + V) once, where expanding would cost S H C (N + V) for every new token; over a whole prompt at once, expanded keys are
    cheaper. `seen_BTS` says which keys a query sees; one that sees nothing gives something finite. o [B, T, H, V] in at least float32.

    Legend: C latent, N and P the channels of K that meet a head's own and the shared key.
    """
    dtype, compute = wide(q_BTHK.dtype), q_BTHK.dtype
    own_BTHN, shared_BTHP = jnp.split(q_BTHK, [k_up_CHN.shape[-1]], axis=-1)
    carried_BTHC = jnp.einsum("bthn,chn->bthc", own_BTHN, k_up_CHN.astype(compute))
    logits_BHTS = jnp.einsum("bthc,bsc->bhts", carried_BTHC, latent_BSC, preferred_element_type=dtype)
    logits_BHTS += jnp.einsum("bthp,bsp->bhts", shared_BTHP, shared_key_BSP, preferred_element_type=dtype)
    logits_BHTS = jnp.where(seen_BTS[:, None], scale * logits_BHTS, jnp.finfo(dtype).min)
    p_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(compute)
    # heads before tokens: XLA's CPU backend has no bf16 product for the other order where T is 1
    mixed_BHTC = jnp.einsum("bhts,bsc->bhtc", p_BHTS, latent_BSC, preferred_element_type=dtype).astype(compute)
    return jnp.einsum("bhtc,chv->bthv", mixed_BHTC, v_up_CHV.astype(compute), preferred_element_type=dtype)


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
