"""A look at what a run has learnt: how its model continues a text."""

from __future__ import annotations

import jax
import numpy as np

from k3train.config import EvaluationConfig, ModelConfig
from k3train.data.tokenizer import ByteTokenizer
from k3train.inference.generate import stream
from k3train.inference.sampling import Sampling
from k3train.train.state import Tree

TEMPERATURE = 0.8


def sample(config: EvaluationConfig, model: ModelConfig, params: Tree, tokenizer: ByteTokenizer) -> str | None:
    """`config.sample_prompt` and up to `config.sample_tokens` drawn tokens, as text; the same for the same parameters.

    None without a prompt, and where parameters are spread over several devices, since generation runs on one. A document's end ends it.
    """
    if config.sample_prompt is None or any(len(leaf.devices()) > 1 for leaf in jax.tree.leaves(params)):
        return None
    prompt = np.concatenate([[tokenizer.boundary_id], tokenizer.encode(config.sample_prompt)])
    pieces = stream(
        model,
        params,
        [prompt],
        max_new_tokens=config.sample_tokens,
        sampling=Sampling(temperature=TEMPERATURE),
        stop_id=tokenizer.boundary_id,
        num_tokens=tokenizer.vocab_size,
    )
    new_N = np.concatenate([piece_BN[0] for piece_BN in pieces])
    return config.sample_prompt + tokenizer.decode(new_N[new_N >= 0])
