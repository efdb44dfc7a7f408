"""What the mixers keep of earlier tokens, and each mixer over it, from the equations of `k3train.models`.

Kimi Delta Attention keeps a state of fixed size and the last inputs of its convolutions (report 5.4.2); latent attention one latent and
one shared key per token. Rows of a batch stand at different places, so every row has its own length.
Legend: B batch, T new tokens, D model, H heads, K/V key/value channels, W taps of the convolutions, C latent, P shared key, S tokens that
fit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.config import Mixer, ModelConfig
from k3train.models.attention import latent_attention
from k3train.models.kda import KimiDeltaAttention
from k3train.models.layout import LocalLayout
from k3train.models.mla import LatentAttention
from k3train.models.norms import wide
from k3train.models.short_conv import short_conv

LAYOUT = LocalLayout()


class KDACache(NamedTuple):
    """The state in at least float32, and per q, k and v the last W - 1 inputs of the convolution, oldest first, zero before the start."""

    state_BHKV: jax.Array
    windows_BWHK: tuple[jax.Array, ...]


class MLACache(NamedTuple):
    """Normalised latents and placed shared keys; zero from a row's length on."""

    latent_BSC: jax.Array
    shared_key_BSP: jax.Array


LayerCache = KDACache | MLACache


class Cache(NamedTuple):
    """Everything that a decoder keeps."""

    layers: tuple[LayerCache, ...]
    lengths_B: jax.Array
    """int32: tokens that each row holds."""


def empty(config: ModelConfig, batch: int, max_length: int) -> Cache:
    """A cache for rows of up to `max_length` tokens, with none in it."""
    layers = tuple(_empty_layer(config, mixer, batch, max_length) for mixer in config.mixers)
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def _empty_layer(config: ModelConfig, mixer: Mixer, batch: int, max_length: int) -> LayerCache:
    compute = jnp.dtype(config.dtypes.compute)
    if mixer == "kda":
        heads, width = config.kda.num_heads, config.kda.head_dim
        window_BWHK = jnp.zeros((batch, config.kda.conv_width - 1, heads, width), compute)
        return KDACache(jnp.zeros((batch, heads, width, width), wide(compute)), (window_BWHK,) * 3)
    mla = config.mla
    return MLACache(*(jnp.zeros((batch, max_length, width), compute) for width in (mla.kv_lora_rank, mla.rope_head_dim)))


def advance(
    mixer: KimiDeltaAttention | LatentAttention, x_BTD: jax.Array, real_BT: jax.Array, cache: LayerCache, lengths_B: jax.Array
) -> tuple[jax.Array, LayerCache]:
    """A mixer over T new tokens behind the kept ones: y [B, T, D] and what is kept then.

    Equal to the mixer over all tokens at once. More than one new token must be the first ones of their row (a prompt). `real_BT` is True
    and then False along a row; tokens that are not real leave no trace, and their y means nothing.
    """
    if isinstance(mixer, KimiDeltaAttention):
        assert isinstance(cache, KDACache)
        return _advance_kda(mixer, x_BTD, real_BT, cache)
    assert isinstance(cache, MLACache)
    return _begin_mla(mixer, x_BTD, real_BT, cache) if x_BTD.shape[1] > 1 else _step_mla(mixer, x_BTD, real_BT, cache, lengths_B)


def _advance_kda(mixer: KimiDeltaAttention, x_BTD: jax.Array, real_BT: jax.Array, cache: KDACache) -> tuple[jax.Array, KDACache]:
    """The chunk form over a prompt, the recurrence over one token."""
    inputs = zip(mixer.projections(x_BTD), mixer.convolutions, cache.windows_BWHK, strict=True)
    (q_BTHK, k_BTHK, v_BTHK), windows = zip(*(convolve(*qkv, real_BT) for qkv in inputs), strict=True)
    decay_BTHK, beta_BTH = mixer.gates(x_BTD)
    o_BTHK, state_BHKV = LAYOUT.kda_from(
        cache.state_BHKV, q_BTHK, k_BTHK, v_BTHK, decay_BTHK, beta_BTH, mixer.a_log[...], mixer.dt_bias[...],
        lower_bound=mixer.config.kda.gate_lower_bound, segment_ids_BT=_segments(real_BT),
    )  # fmt: skip
    return mixer.output(o_BTHK, x_BTD), KDACache(state_BHKV, windows)


def convolve(x_BTHK: jax.Array, w_HKW: jax.Array, window_BWHK: jax.Array, real_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The short convolution behind a window of earlier inputs: y [B, T, H, K] and the window behind the last real token."""
    kept = window_BWHK.shape[1]
    extended_BXHK = jnp.concatenate([window_BWHK, x_BTHK], axis=1)
    y_BTHK = short_conv(extended_BXHK, w_HKW)[:, kept:]
    newest_BW = jnp.sum(real_BT, axis=1)[:, None] + jnp.arange(kept)
    return y_BTHK, jnp.take_along_axis(extended_BXHK, newest_BW[..., None, None], axis=1)


def _begin_mla(mixer: LatentAttention, x_BTD: jax.Array, real_BT: jax.Array, cache: MLACache) -> tuple[jax.Array, MLACache]:
    """A prompt sees itself alone: keys and values are expanded as in training, and the latents kept."""
    positions_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1], dtype=jnp.int32), real_BT.shape)
    latent_BTC, shared_key_BTP = mixer.latents(x_BTD, positions_BT)
    k_BTHK, v_BTHV = mixer.expand(latent_BTC, shared_key_BTP)
    o_BTHV, _ = LAYOUT.attention(mixer.queries(x_BTD, positions_BT), k_BTHK, v_BTHV, scale=mixer.scale, segment_ids_BT=_segments(real_BT))
    kept = (
        whole.at[:, : x_BTD.shape[1]].set(jnp.where(real_BT[..., None], new, 0))
        for whole, new in zip(cache, (latent_BTC, shared_key_BTP), strict=True)
    )
    return mixer.output(o_BTHV, x_BTD), MLACache(*kept)


def _step_mla(
    mixer: LatentAttention, x_BTD: jax.Array, real_BT: jax.Array, cache: MLACache, lengths_B: jax.Array
) -> tuple[jax.Array, MLACache]:
    """One token attends to latents, not to keys and values expanded from them: every step would expand all of them again."""
    positions_BT, slots_S = lengths_B[:, None], jnp.arange(cache.latent_BSC.shape[1])
    rows_B = jnp.arange(len(lengths_B))
    slot_B = jnp.where(real_BT[:, 0], lengths_B, len(slots_S))  # beyond the end nothing is written
    new = mixer.latents(x_BTD, positions_BT)
    kept = MLACache(*(whole.at[rows_B, slot_B].set(part[:, 0], mode="drop") for whole, part in zip(cache, new, strict=True)))
    o_BTHV = latent_attention(
        mixer.queries(x_BTD, positions_BT), *kept, mixer.k_up[...], mixer.v_up[...],
        scale=mixer.scale, seen_BTS=(slots_S <= positions_BT)[:, None],
    )  # fmt: skip
    return mixer.output(o_BTHV, x_BTD), kept


def _segments(real_BT: jax.Array) -> jax.Array:
    """Each row one document, then padding."""
    return jnp.where(real_BT, 0, -1)
