"""How a run gets onto machines: the `k3train` command."""
