"""Rotary positions.  Legend: B batch, T tokens, P rotated channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3train.models.norms import wide


def document_positions(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: tokens since the start of the token's document, which is a run of one segment id."""
    index_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    starts_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    start_BT = jax.lax.cummax(jnp.where(jnp.pad(starts_BT, ((0, 0), (1, 0))), index_T, 0), axis=1)
    return index_T - start_BT


def rotate(channels: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turns channels 2i and 2i + 1, taken as a point in the plane, by the angle position * theta^(-2i / P).

    Neighbouring channels form a pair, as in the published weights of DeepSeek-V3 and Kimi K2; their code then also moves the even channels
    in front of the odd ones, which no product of a query and a key can tell. Wavelengths are not stretched for long contexts (no YaRN).

    channels [..., P] with even P; integer positions that broadcast to [...]. Angles and products in at least float32; keeps the dtype.
    """
    dtype, width = wide(channels.dtype), channels.shape[-1]
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    angles = positions[..., None].astype(dtype) * frequencies
    even, odd = channels[..., 0::2].astype(dtype), channels[..., 1::2].astype(dtype)
    turned = jnp.stack([even * jnp.cos(angles) - odd * jnp.sin(angles), even * jnp.sin(angles) + odd * jnp.cos(angles)], axis=-1)
    return turned.reshape(channels.shape).astype(channels.dtype)
