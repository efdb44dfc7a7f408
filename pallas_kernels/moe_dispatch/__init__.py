"""Mixture-of-experts dispatch: token copies into expert order, the experts' rows back to their tokens, and the counts for balancing."""

from pallas_kernels.moe_dispatch.dispatch import combine, permute, sort_by_expert, sum_choices
from pallas_kernels.moe_dispatch.experts import routed_experts
from pallas_kernels.moe_dispatch.histogram import router_histogram

__all__ = ["combine", "permute", "routed_experts", "router_histogram", "sort_by_expert", "sum_choices"]
