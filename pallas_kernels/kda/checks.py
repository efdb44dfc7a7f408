"""Checks of KDA's arguments: one clear message that names the argument, before anything is traced.

B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.tiles import MOST_NEGATIVE_BOUND


def check_arguments(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    segment_ids_BT: jax.Array | None,
    initial_state_BHKV: jax.Array | None,
) -> None:
    """Raises ValueError if shapes, dtypes or the gate bound do not fit together."""
    if len(q_BTHK.shape) != 4:
        raise ValueError(f"q must have 4 dims [batch, tokens, heads, key channels], got shape {q_BTHK.shape}")
    if len(v_BTHV.shape) != 4:
        raise ValueError(f"v must have 4 dims [batch, tokens, heads, value channels], got shape {v_BTHV.shape}")
    batch, tokens, heads, width = q_BTHK.shape
    if 0 in q_BTHK.shape or 0 in v_BTHV.shape:
        raise ValueError(f"q and v must not be empty, got shapes {q_BTHK.shape} and {v_BTHV.shape}")
    floating = {
        "q": (q_BTHK, (batch, tokens, heads, width)),
        "k": (k_BTHK, (batch, tokens, heads, width)),
        "v": (v_BTHV, (batch, tokens, heads, v_BTHV.shape[-1])),
        "gate": (gate_BTHK, (batch, tokens, heads, width)),
        "beta": (beta_BTH, (batch, tokens, heads)),
        "a_log": (a_log_H, (heads,)),
        "dt_bias": (dt_bias_HK, (heads, width)),
    }
    if initial_state_BHKV is not None:
        floating["initial_state"] = (initial_state_BHKV, (batch, heads, width, v_BTHV.shape[-1]))
    for name, (array, shape) in floating.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but q {q_BTHK.shape} and v {v_BTHV.shape} ask for {shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
    if segment_ids_BT is not None:
        if segment_ids_BT.shape != (batch, tokens):
            raise ValueError(f"segment_ids has shape {segment_ids_BT.shape}, but q {q_BTHK.shape} asks for {(batch, tokens)}")
        if not jnp.issubdtype(segment_ids_BT.dtype, jnp.signedinteger):
            raise ValueError(f"segment_ids must be signed integers (-1 is padding), got {segment_ids_BT.dtype}")
    if not MOST_NEGATIVE_BOUND <= lower_bound < 0:
        raise ValueError(
            f"lower_bound must lie in [{MOST_NEGATIVE_BOUND:g}, 0), got {lower_bound}: a decay is a loss,"
            f" and below {MOST_NEGATIVE_BOUND:g} the factors of a 16-token tile overflow"
        )
