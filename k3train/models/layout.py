"""The Layout seam: the operations whose form depends on how work is spread over devices.

The decoder calls a `Layout`; here are the protocol and the one-device form. `k3train.sharding` has the other form.
Legend: B batch, T tokens, H heads, K/V key/value channels, W taps, S = B*T tokens, L latent, E experts, k active
experts, F hidden, M = S*k routed rows, R row shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import jax

import pallas_kernels.kda
from k3train.config import Kernels
from k3train.models.attention import causal_attention
from k3train.models.short_conv import short_conv
from pallas_kernels.moe_dispatch import SituGLU, routed_experts, router_histogram, router_logits

# This module is the models' only door to the kernels. The last two need no Layout: XLA spreads them over devices by itself.
__all__ = ["Activation", "Layout", "LocalLayout", "SituGLU", "router_logits"]

Activation = Callable[[jax.Array, jax.Array], jax.Array]


class Layout(Protocol):
    """Where kernel choice and parallelism meet. Shapes are global; dtypes as in the functions that are named."""

    def kda(
        self,
        q_BTHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHV: jax.Array,
        gate_BTHK: jax.Array,
        beta_BTH: jax.Array,
        a_log_H: jax.Array,
        dt_bias_HK: jax.Array,
        *,
        lower_bound: float,
        segment_ids_BT: jax.Array,
    ) -> jax.Array:
        """Kimi Delta Attention from raw gates, states zero at the start of each row; o [B, T, H, V]."""
        ...

    def attention(
        self, q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHV: jax.Array, *, scale: float, segment_ids_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`attention.causal_attention`: o [B, T, H, V] and the largest logit of each head [H]."""
        ...

    def short_conv(self, x_BTHK: jax.Array, w_HKW: jax.Array, *, segment_ids_BT: jax.Array) -> jax.Array:
        """`short_conv.short_conv`."""
        ...

    def experts(
        self,
        z_BTL: jax.Array,
        expert_ids_BTk: jax.Array,
        weights_BTk: jax.Array,
        w_gate_ELF: jax.Array,
        w_up_ELF: jax.Array,
        w_down_EFL: jax.Array,
        *,
        activation: Activation,
    ) -> jax.Array:
        """sum_j weight_j * expert_{id_j}(z), combined in at least float32; u [B, T, L]."""
        ...

    def top_k(self, x_BTE: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """`jax.lax.top_k` of every token: values and int32 indices [B, T, k]."""
        ...

    def router_histogram(
        self,
        scores_BTE: jax.Array,
        cutoffs_BT: jax.Array,
        real_BT: jax.Array,
        low: jax.Array,
        width: jax.Array,
        *,
        bins: int,
    ) -> jax.Array:
        """`moe_dispatch.router_histogram` of each shard of the rows, not yet summed; int32 [R, E, bins]."""
        ...

    def constrain(self, x: jax.Array, logical_axes: tuple[str | None, ...]) -> jax.Array:
        """States how an activation lies on the devices; the identity on one device."""
        ...


class LocalLayout:
    """The one-device form: calls the kernels, those written for the device where they apply or (`xla`) XLA's forms alone."""

    def __init__(self, kernels: Kernels = "auto"):
        self._implementation: Literal["xla"] | None = "xla" if kernels == "xla" else None

    def kda(self, q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, *, lower_bound, segment_ids_BT):
        """See `Layout.kda`."""
        o_BTHV, _ = self.kda_from(
            None, q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT
        )
        return o_BTHV

    def kda_from(self, state_BHKV, q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, *, lower_bound, segment_ids_BT):
        """`Layout.kda` from a state before the row's first document on (None: zero), with the state after its last; single tokens too."""
        several = "chunked" if self._implementation == "xla" else None
        return pallas_kernels.kda.kda(
            q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, lower_bound=lower_bound, segment_ids_BT=segment_ids_BT,
            initial_state_BHKV=state_BHKV, implementation="recurrent" if q_BTHK.shape[1] == 1 else several,
        )  # fmt: skip

    def attention(self, q_BTHK, k_BTHK, v_BTHV, *, scale, segment_ids_BT):
        """See `Layout.attention`."""
        return causal_attention(q_BTHK, k_BTHK, v_BTHV, scale=scale, segment_ids_BT=segment_ids_BT)

    def short_conv(self, x_BTHK, w_HKW, *, segment_ids_BT):
        """See `Layout.short_conv`."""
        return short_conv(x_BTHK, w_HKW, segment_ids_BT=segment_ids_BT)

    def experts(self, z_BTL, expert_ids_BTk, weights_BTk, w_gate_ELF, w_up_ELF, w_down_EFL, *, activation):
        """See `Layout.experts`."""
        latent, active = z_BTL.shape[-1], expert_ids_BTk.shape[-1]
        u_SL = routed_experts(
            z_BTL.reshape(-1, latent), expert_ids_BTk.reshape(-1, active), weights_BTk.reshape(-1, active),
            w_gate_ELF, w_up_ELF, w_down_EFL, activation=activation, implementation=self._implementation,
        )  # fmt: skip
        return u_SL.reshape(z_BTL.shape)

    def top_k(self, x_BTE, k):
        """See `Layout.top_k`."""
        return jax.lax.top_k(x_BTE, k)

    def router_histogram(self, scores_BTE, cutoffs_BT, real_BT, low, width, *, bins):
        """See `Layout.router_histogram`."""
        scores_SE = scores_BTE.reshape(-1, scores_BTE.shape[-1])
        return router_histogram(
            scores_SE, cutoffs_BT.reshape(-1), real_BT.reshape(-1), low, width, bins=bins, implementation=self._implementation
        )[None]

    def constrain(self, x, logical_axes):
        """See `Layout.constrain`."""
        return x
