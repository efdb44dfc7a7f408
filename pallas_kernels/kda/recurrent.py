"""KDA token by token: the definition that every other form must equal, in values and in gradients.

B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.inputs import compute_dtype, number_documents, prepare

_PRECISION = jax.lax.Precision.HIGHEST


def kda_recurrent(
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
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention as a scan over tokens, report section 2.1 equations 1, 2, 5 and 6.

    Arguments and results as in `pallas_kernels.kda.kda`. Differentiating it keeps one state per token, so it is for
    tests and for decoding, not for training.
    """
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH)
    batch, tokens, heads, key_width = q_BTHK.shape
    number_BT, real_BT = (jnp.zeros((batch, tokens), jnp.int32), None) if segment_ids_BT is None else number_documents(segment_ids_BT)
    starts_BT = jnp.diff(number_BT, axis=1, prepend=0) > 0
    prepared = prepare(
        q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound=lower_bound, real_BT=real_BT, dtype=dtype
    )
    if initial_state_BHKV is None:
        initial_state_BHKV = jnp.zeros((batch, heads, key_width, v_BTHV.shape[-1]), dtype)

    def step(state_BHKV: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, starts_B = token
        state_BHKV = jnp.where(starts_B[:, None, None, None], 0, state_BHKV)
        state_BHKV = jnp.exp(g_BHK)[..., None] * state_BHKV
        predicted_BHV = jnp.einsum("bhkv,bhk->bhv", state_BHKV, k_BHK, precision=_PRECISION)
        write_BHV = beta_BH[..., None] * (v_BHV - predicted_BHV)
        state_BHKV = state_BHKV + k_BHK[..., None] * write_BHV[..., None, :]
        o_BHV = jnp.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK, precision=_PRECISION)
        return state_BHKV, o_BHV

    time_major = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*prepared, starts_BT))
    final_state_BHKV, o_TBHV = jax.lax.scan(step, initial_state_BHKV.astype(dtype), time_major)
    return jnp.moveaxis(o_TBHV, 0, 1).astype(v_BTHV.dtype), final_state_BHKV
