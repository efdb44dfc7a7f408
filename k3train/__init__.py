"""k3train: train Kimi-K3-class language models with JAX and Flax."""
