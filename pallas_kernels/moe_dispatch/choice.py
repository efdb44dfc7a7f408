"""Whether the dispatch's Hopper kernels run. They need JAX 0.11, so their modules are imported only where they do."""

from __future__ import annotations

from pallas_kernels.grouped_matmul import Implementation
from pallas_kernels.target import target


def on_hopper(implementation: Implementation | None) -> bool:
    """True where `hopper` is asked for, or nothing is, and what is compiled for is a Hopper GPU; a kernel may still refuse a shape."""
    if implementation not in (None, "hopper") or target().platform != "gpu":
        return False
    from pallas_kernels.grouped_matmul import hopper

    return hopper.platform_refusal() is None
