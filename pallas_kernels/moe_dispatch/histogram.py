"""Counts for quantile balancing: for each expert, how the biases are spread that would let tokens in (Kimi K3 report, 2.3.3 and App. D).

Shapes: S tokens, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import Implementation
from pallas_kernels.moe_dispatch.choice import on_hopper


def router_histogram(
    scores_SE: jax.Array,
    cutoffs_S: jax.Array,
    real_S: jax.Array,
    low: jax.Array | float,
    width: jax.Array | float,
    *,
    bins: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Counts cutoff - score of every pair of a real token and an expert: bin clip(floor((cutoff - score - low) / width), 0, bins - 1).

    In XLA one scatter-add of S E ones: one pass, where a sort needs several over as many keys, and comparing with every edge takes S E bins
    operations. It adds integers, so the counts do not depend on the order. XLA on a CPU holds 8 bytes per pair beside the counts.

    Args:
        scores_SE: raw router scores, float.
        cutoffs_S: the largest biased score that the token did not choose.
        real_S: bool; other tokens are not counted, whatever their values.
        low: lower edge of the first bin.
        width: of a bin.
        bins: number of bins.
        implementation: None and `hopper` are a kernel on a Hopper GPU, for float32, S a multiple of 64, E of 32 and at most 1024 bins;
            it counts a NaN nowhere.

    Returns:
        int32 [E, bins].

    Raises:
        ValueError: shapes do not fit, or there is no bin, or more counts than int32 can number.
    """
    tokens, num_experts = scores_SE.shape
    if cutoffs_S.shape != (tokens,) or real_S.shape != (tokens,):
        raise ValueError(f"router_histogram: scores {scores_SE.shape}, cutoffs {cutoffs_S.shape} and real {real_S.shape} differ in tokens.")
    if not 0 < num_experts * bins < 2**31:
        raise ValueError(f"router_histogram: {num_experts} experts x {bins} bins must be at least one count and fewer than 2^31.")
    if on_hopper(implementation):
        from pallas_kernels.moe_dispatch import hopper_histogram

        if hopper_histogram.refusal(scores_SE, bins) is None:
            return hopper_histogram.histogram(scores_SE, cutoffs_S, real_S, low, width, bins=bins)
    places_SE = jnp.clip(jnp.floor((cutoffs_S[:, None] - scores_SE - low) / width), 0, bins - 1).astype(jnp.int32)
    places_SE += bins * jnp.arange(num_experts, dtype=jnp.int32)
    places_SE = jnp.where(real_S[:, None], places_SE, num_experts * bins)  # past the end: dropped
    return jnp.zeros(num_experts * bins, jnp.int32).at[places_SE].add(1, mode="drop").reshape(num_experts, bins)
