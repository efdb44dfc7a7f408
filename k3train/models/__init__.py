"""The architecture as Flax NNX modules over pure functions; one file per mechanism."""
