"""Where everything of a run lies on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding

from k3train.config import Kernels, MeshConfig
from k3train.models.layout import Layout
from k3train.sharding.layout import SPLIT, WHOLE, sharded_layout
from k3train.sharding.mesh import make_mesh
from k3train.sharding.rules import parameter_shardings


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh with the Layout and the shardings that belong to it."""

    mesh: Mesh
    layout: Layout

    @property
    def batch(self) -> NamedSharding:
        """Sharding of the arrays of a batch [B, ...]."""
        return NamedSharding(self.mesh, SPLIT)

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of what every device holds whole."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def row_shards(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        return self.mesh.size

    def params(self, axes: Any, params: Any) -> Any:
        """The sharding of every parameter, from its logical axes and its shape."""
        return parameter_shardings(axes, params, self.mesh)


def place(config: MeshConfig, kernels: Kernels = "auto") -> Placement:
    """Lays a run out over all devices.

    Raises:
      UserError: the degrees do not multiply to the device count.
    """
    mesh = make_mesh(config)
    return Placement(mesh=mesh, layout=sharded_layout(mesh, kernels))
