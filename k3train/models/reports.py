"""Small arrays that layers report beside their output, and how those of all layers make the decoder's side outputs.

A layer reports sums over the tokens of each row of the batch, and no mean: rows lie on different devices, and a mean inside the scan over
layers would make them wait for each other once per layer. `join` sums over the rows once, after the last layer.
Legend: L layers that report a name, R repeats, B batch, T tokens, N sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Report = dict[str, jax.Array]

TOTALS = ("expert_load",)
"""Reported by row [B, ...], summed here."""
MEANS = ("router_entropy", "kda_log_decay", "kda_at_bound", "source_weights_mixer", "source_weights_ffn")
"""Reported as sums over a row's real tokens [B, ...], averaged here over all real tokens."""
SOURCE_WEIGHTS = ("source_weights_mixer", "source_weights_ffn")


def row_sums(values_BT: jax.Array, real_BT: jax.Array) -> jax.Array:
    """Sum over the real tokens of each row; [..., B, T] -> [..., B]. What is not real may be not finite."""
    return jnp.sum(jnp.where(real_BT, values_BT, 0), axis=-1)


def depth_report(mixer_weights_NBT: jax.Array | None, ffn_weights_NBT: jax.Array | None, left_BTD: jax.Array, real_BT: jax.Array) -> Report:
    """`source_weights_mixer` and `source_weights_ffn` [B, N], if sublayers mix; `finite` bool [B], whether all is that the layer leaves."""
    weights = {"source_weights_mixer": mixer_weights_NBT, "source_weights_ffn": ffn_weights_NBT}
    sums = {name: row_sums(jax.lax.stop_gradient(p_NBT), real_BT).T for name, p_NBT in weights.items() if p_NBT is not None}
    return {**sums, "finite": jnp.all(jnp.isfinite(left_BTD), axis=(1, 2))}


def interleave(by_position: Sequence[Report]) -> Report:
    """Reports [R, ...] of the positions of a repeated pattern -> reports [L, ...] in the order of the layers."""
    joined = {}
    for name in dict.fromkeys(name for report in by_position for name in report):
        stacked = jnp.stack([report[name] for report in by_position if name in report], axis=1)
        joined[name] = stacked.reshape(-1, *stacked.shape[2:])
    return joined


def join(in_order: Sequence[Report], real_BT: jax.Array) -> Report:
    """Reports [L, ...] of consecutive parts of the decoder -> its side outputs, a leading dim over the layers that have the name."""
    most = max((report[name].shape[-1] for report in in_order for name in SOURCE_WEIGHTS if name in report), default=0)
    real_tokens = jnp.maximum(jnp.sum(real_BT), 1)
    outputs = {}
    for name in sorted({name for report in in_order for name in report}):
        parts = [report[name] for report in in_order if name in report]
        if name in SOURCE_WEIGHTS:
            parts = [jnp.pad(part, ((0, 0), (0, 0), (0, most - part.shape[-1]))) for part in parts]
        values = jnp.concatenate(parts)
        if name in TOTALS:
            values = jnp.sum(values, axis=1)
        elif name in MEANS:
            values = (jnp.sum(values, axis=1) / real_tokens).astype(jnp.float32)
        elif name == "finite":
            values = jnp.all(values, axis=1)
        outputs[name] = values
    return outputs
