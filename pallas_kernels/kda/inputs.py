"""What every form of KDA does to its raw inputs before the recurrence.

B batch, T tokens, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NORM_EPS = 1e-6
PADDING = -1


class Documents(NamedTuple):
    """Where the documents of packed rows lie.

    `number_BT` (int32) counts the documents of a row from 0; padding carries the number of the last real token before
    it (0 at the front of a row). `real_BT` (bool) is False at padding.
    """

    number_BT: jax.Array
    real_BT: jax.Array


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Float64 if any of the arrays is float64, else float32."""
    return jnp.dtype(jnp.float64) if any(a.dtype == jnp.float64 for a in arrays) else jnp.dtype(jnp.float32)


def number_documents(segment_ids_BT: jax.Array) -> Documents:
    """Turns segment ids (int, negative is padding) into `Documents`.

    A document ends where the id of the next *real* token differs, so padding between two tokens of one id does not
    split it, and an id that comes back after another one is a new document.
    """
    real_BT = segment_ids_BT >= 0
    position_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    last_real_BT = jax.lax.cummax(jnp.where(real_BT, position_T, -1), axis=1)
    before_BT = jnp.pad(last_real_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1)
    starts_BT = real_BT & (before_BT >= 0) & (id_before_BT != segment_ids_BT)
    return Documents(jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32), real_BT)


def normalize(x_BTHK: jax.Array) -> jax.Array:
    """Divides each head's vector by sqrt(sum x^2 + 1e-6): finite, with finite gradients, at zero."""
    return x_BTHK * jax.lax.rsqrt(jnp.sum(x_BTHK * x_BTHK, axis=-1, keepdims=True) + NORM_EPS)


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    """The logistic function for beta. Its derivative keeps full precision where beta nears 1; s (1 - s) in float32 does not."""
    small = jnp.exp(jnp.minimum(x, -x))  # of -|x|, XLA would make a transposition of its own (on a GPU)
    return jnp.where(x >= 0, 1, small) / (1 + small)


@sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    small = jnp.exp(-jnp.abs(primals[0]))
    return sigmoid(primals[0]), tangents[0] * (small / ((1 + small) * (1 + small)))


def log_decay(gate_BTHK: jax.Array, a_log_H: jax.Array, dt_bias_HK: jax.Array, lower_bound: float) -> jax.Array:
    """The bounded gate, report section 2.1 equation 5: log alpha in (lower_bound, 0)."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log_H)[:, None] * (gate_BTHK + dt_bias_HK))


class Prepared(NamedTuple):
    """Inputs of the bare recurrence in the compute dtype.

    Padding has query, log decay and beta 0: it moves no state and its output is 0.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    g_BTHK: jax.Array
    beta_BTH: jax.Array


def prepare(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    gate_BTHK: jax.Array,
    beta_BTH: jax.Array,
    a_log_H: jax.Array,
    dt_bias_HK: jax.Array,
    *,
    lower_bound: float,
    real_BT: jax.Array | None,
    dtype: jnp.dtype,
) -> Prepared:
    """Normalises and scales queries, normalises keys, and turns raw gate and beta logits into decay and step size."""
    q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK = (
        x.astype(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK)
    )
    q_BTHK, k_BTHK = normalize(q_BTHK) * q_BTHK.shape[-1] ** -0.5, normalize(k_BTHK)
    g_BTHK = log_decay(gate_BTHK, a_log_H, dt_bias_HK, lower_bound)
    beta_BTH = sigmoid(beta_BTH)
    if real_BT is not None:
        q_BTHK = jnp.where(real_BT[:, :, None, None], q_BTHK, 0)
        g_BTHK = jnp.where(real_BT[:, :, None, None], g_BTHK, 0)
        beta_BTH = jnp.where(real_BT[:, :, None], beta_BTH, 0)
    return Prepared(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
