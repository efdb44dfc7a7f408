"""Mixture-of-experts dispatch: router, token copies into expert order, the experts, their rows back to tokens, and counts for balancing."""

from pallas_kernels.moe_dispatch.dispatch import combine, permute, sort_by_expert, sum_choices
from pallas_kernels.moe_dispatch.experts import routed_experts
from pallas_kernels.moe_dispatch.histogram import router_histogram
from pallas_kernels.moe_dispatch.router import router_logits
from pallas_kernels.moe_dispatch.situ import SituGLU

__all__ = ["SituGLU", "combine", "permute", "routed_experts", "router_histogram", "router_logits", "sort_by_expert", "sum_choices"]
