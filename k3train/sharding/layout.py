"""The sharded Layout: kernels run on each device's rows, in a `shard_map` that is manual over the whole mesh.

A kernel cannot be partitioned automatically, so each is wrapped here. Parameters that a kernel reads enter whole: the
wrapper's input spec gathers them, and its transpose sums their gradients over the devices.
Legend: see `k3train.models.layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.config import Kernels
from k3train.models.layout import Layout, LocalLayout
from k3train.sharding.mesh import ROWS
from k3train.sharding.rules import activation_spec

SPLIT, WHOLE = PartitionSpec(ROWS), PartitionSpec()


def sharded_layout(mesh: Mesh, kernels: Kernels = "auto") -> Layout:
    """The form of the Layout for a mesh; one device needs no wrapping."""
    return ShardedLayout(mesh, kernels) if mesh.size > 1 else LocalLayout(kernels)


class ShardedLayout:
    """Data-parallel form: rows are split over `replica` and `fsdp`."""

    def __init__(self, mesh: Mesh, kernels: Kernels = "auto"):
        self.mesh, self.local = mesh, LocalLayout(kernels)

    def kda(self, q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, a_log_H, dt_bias_HK, *, lower_bound, segment_ids_BT):
        """See `Layout.kda`."""

        def run(q, k, v, gate, beta, segment_ids, a_log, dt_bias):
            return self.local.kda(q, k, v, gate, beta, a_log, dt_bias, lower_bound=lower_bound, segment_ids_BT=segment_ids)

        return self._on_rows(run, 6, 2)(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, segment_ids_BT, a_log_H, dt_bias_HK)

    def attention(self, q_BTHK, k_BTHK, v_BTHV, *, scale, segment_ids_BT):
        """See `Layout.attention`."""

        def run(q, k, v, segment_ids):
            o_BTHV, max_logit_H = self.local.attention(q, k, v, scale=scale, segment_ids_BT=segment_ids)
            return o_BTHV, max_logit_H[None]

        o_BTHV, max_logit_per_shard = self._on_rows(run, 4, 0)(q_BTHK, k_BTHK, v_BTHV, segment_ids_BT)
        return o_BTHV, jnp.max(jax.lax.stop_gradient(max_logit_per_shard), axis=0)

    def short_conv(self, x_BTHK, w_HKW, *, segment_ids_BT):
        """See `Layout.short_conv`."""

        def run(x, segment_ids, w):
            return self.local.short_conv(x, w, segment_ids_BT=segment_ids)

        return self._on_rows(run, 2, 1)(x_BTHK, segment_ids_BT, w_HKW)

    def experts(self, z_BTL, expert_ids_BTk, weights_BTk, w_gate_ELF, w_up_ELF, w_down_EFL, *, activation):
        """See `Layout.experts`."""

        def run(z, expert_ids, weights, w_gate, w_up, w_down):
            return self.local.experts(z, expert_ids, weights, w_gate, w_up, w_down, activation=activation)

        return self._on_rows(run, 3, 3)(z_BTL, expert_ids_BTk, weights_BTk, w_gate_ELF, w_up_ELF, w_down_EFL)

    def top_k(self, x_BTE, k):
        """See `Layout.top_k`; XLA would gather all rows on every device."""
        return self._on_rows(lambda x: self.local.top_k(x, k), 1, 0)(x_BTE)

    def router_histogram(self, scores_BTE, cutoffs_BT, real_BT, low, width, *, bins):
        """See `Layout.router_histogram`; nothing is sent."""

        def run(scores, cutoffs, real, low, width):
            return self.local.router_histogram(scores, cutoffs, real, low, width, bins=bins)

        return self._on_rows(run, 3, 2)(scores_BTE, cutoffs_BT, real_BT, low, width)

    def constrain(self, x, logical_axes):
        """See `Layout.constrain`."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, activation_spec(logical_axes)))

    def _on_rows(self, run: Callable[..., Any], split: int, whole: int) -> Callable[..., Any]:
        """Runs on each device its rows of the first `split` arguments and all of the `whole` others."""
        # check_vma is off: the kernels' own VJPs state no replication types
        return jax.shard_map(run, mesh=self.mesh, in_specs=(SPLIT,) * split + (WHOLE,) * whole, out_specs=SPLIT, check_vma=False)
