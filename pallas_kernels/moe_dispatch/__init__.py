"""Mixture-of-experts dispatch: put each token's copies in expert order, and bring the experts' rows back to their tokens."""

from pallas_kernels.moe_dispatch.dispatch import combine, permute, sort_by_expert

__all__ = ["combine", "permute", "sort_by_expert"]
