"""The TPUs that tests compile for, and what a compiled program says of itself."""

from __future__ import annotations

import re
from typing import Any

MIB = 1 << 20
VMEM = {"v5p:2x2x2": 64 * MIB, "v6e:4x4": 128 * MIB, "tpu7x:2x2x2": 64 * MIB}
"""Topologies, and VMEM of one core."""


def describe(name: str, compiled: Any) -> str:
    """A line with a program's sizes on one device."""
    memory = compiled.memory_analysis()
    vmem = max(kernels_vmem(compiled).values(), default=0)
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes)
    hbm = "arguments {:.1f}, results {:.1f} ({:.1f} in place), temporaries {:.1f} MB".format(*(size / 1e6 for size in sizes))
    return f"{name}: code {memory.generated_code_size_in_bytes / 1e6:.2f} MB, VMEM of a kernel {vmem / MIB:.1f} MiB, HBM {hbm}"


def kernels_vmem(compiled: Any) -> dict[str, int]:
    """The Mosaic kernels of a program by name, with the most VMEM that one of a name uses."""
    kernels: dict[str, int] = {}
    for line in compiled.as_text().splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.search(r"%(?:transpose_|jvp_)*(\w+?)_*[\s.]", line)[1]  # differentiation decorates names, numbers follow them
        used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1]) if used else []
        kernels[name] = max(kernels.get(name, 0), *map(int, sizes), 0)
    return kernels
