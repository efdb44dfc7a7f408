"""Programs compiled for TPUs on a machine without one, by `make test-tpu`. What passing tests print ends the run's output."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.tpu.chips import VMEM

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on a TPU, so processes may share it


@pytest.fixture(params=VMEM, scope="module")
def topology(request: pytest.FixtureRequest) -> str:
    """The name of a topology."""
    return request.param


@pytest.fixture(scope="module")
def devices(topology: str) -> list[Any]:
    """Its devices, which can be compiled for."""
    pytest.importorskip("libtpu", reason="needs libtpu: make test-tpu")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@pytest.fixture(scope="module")
def mesh(devices: list[Any]):
    """All of them along one axis."""
    from jax.sharding import AxisType, Mesh

    return Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the figures, whichever process ran the tests."""
    passed = [report.capstdout for report in terminalreporter.stats.get("passed", ()) if report.nodeid.startswith("tests/tpu")]
    lines = sorted(line for text in passed for line in text.splitlines() if line)
    if lines:
        terminalreporter.section("compiled for TPUs")
        terminalreporter.write_line("\n".join(lines))
