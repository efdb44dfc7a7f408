"""Model FLOPs utilisation: known devices by the maker's dense figure, none for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from k3train.train.device_peaks import mfu, peak_flops


def device(kind: str) -> Any:
    return SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5", 459e12),
        ("TPU v5 lite", 197e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H1000", None),
        ("cpu", None),
    ],
)
def test_peaks_by_kind(kind: str, peak: float | None):
    assert peak_flops(device(kind)) == peak


def test_mfu_is_over_all_devices_and_absent_if_one_is_unknown():
    assert mfu(1000.0, 989e9, [device("NVIDIA H200")] * 2) == pytest.approx(0.5)
    assert mfu(1000.0, 989e9, [device("NVIDIA H200"), device("cpu")]) is None
