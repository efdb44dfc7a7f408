"""What is compiled for: the choice of a kernel must ask this, and not which devices the process has."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Target(NamedTuple):
    """A kind of device."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    cores: int
    """TensorCores that one device has: 2 where a TPU joins two into one device, else 1."""


def target() -> Target:
    """The devices of the mesh inside a `shard_map`, else the process's default ones.

    The two differ when a program is compiled ahead of time for devices that this machine does not have.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return Target(described.platform, described.num_cores or 1 if described.platform == "tpu" else 1)
    platform = jax.default_backend()
    return Target(platform, getattr(jax.devices()[0], "num_cores", None) or 1 if platform == "tpu" else 1)
