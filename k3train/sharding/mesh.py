"""From degrees of parallelism to a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from k3train.config import MeshConfig
from k3train.errors import UserError

AXES = ("replica", "fsdp")  # outermost first: replicas may sit on a slower network
ROWS = AXES  # axes over which the rows of a batch are split


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices; `fsdp = None` takes what the other degrees leave. Axes are Auto: state and batches carry
    stated shardings, and collectives that matter are written out.

    Raises:
      UserError: the degrees do not multiply to the device count; says which factor to change.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    fsdp = config.fsdp if config.fsdp is not None else max(count // config.replica, 1)
    if config.replica * fsdp != count:
        hint = f"set mesh.fsdp = {count // config.replica}" if count % config.replica == 0 else f"set mesh.replica to a divisor of {count}"
        raise UserError(
            f"mesh.replica * mesh.fsdp = {config.replica} * {fsdp} = {config.replica * fsdp}, but the number of devices is {count}: {hint}."
        )
    return Mesh(np.asarray(devices).reshape(config.replica, fsdp), AXES, axis_types=(AxisType.Auto,) * len(AXES))
