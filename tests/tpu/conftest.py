"""Programs compiled for TPUs on a machine without one, by `make test-tpu`. What passing tests print ends the run's output."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.tpu.chips import VMEM

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on a TPU, so processes may share it
# Compiling the train step for tpu7x with JAX 0.10.2, libtpu's threads run out of stack where they estimate what fused matmuls cost.
os.environ["LIBTPU_INIT_ARGS"] = f"--fibers_default_thread_stack_size={1 << 20} {os.environ.get('LIBTPU_INIT_ARGS', '')}"


@pytest.fixture(autouse=True)
def really_compiled(fresh_compilation: None) -> None:
    """Not from the persistent cache, which cannot give back programs for devices that are not there, and warns of each."""


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
