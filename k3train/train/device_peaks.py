"""Dense BF16 matrix rates of devices, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
}
"""FLOP/s without sparsity, from the makers' data sheets, by the start of JAX's `device_kind`."""


def peak_flops(device: Any) -> float | None:
    """A JAX device's dense BF16 rate in FLOP/s; None for a device that the table lacks: no rate is better than a guessed one."""
    kind = device.device_kind
    known = [name for name in PEAKS if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(known, key=len)] if known else None


def mfu(tokens_per_second: float, training_flops_per_token: float, devices: Sequence[Any]) -> float | None:
    """Model FLOPs per second over the devices' peak; None if a device is unknown. Recomputation does not count as work."""
    peaks = [peak_flops(device) for device in devices]
    if not peaks or None in peaks:
        return None
    return tokens_per_second * training_flops_per_token / sum(peak for peak in peaks if peak)
