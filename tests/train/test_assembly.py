"""The whole step of a model with every mechanism: microbatches, and what the optimizer is told."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config import Experiment, ModelConfig, MuonConfig, OptimizerConfig
from k3train.data.loader import open_data
from k3train.train.assembly import assemble, evidence
from tests.quick import QUICK_COMPILE


@pytest.mark.numerics
def test_two_microbatches_give_the_update_of_the_whole_batch_router_biases_included(experiment: Experiment):
    """One layer of attention and experts, which compiles quickly; float32 products in Newton-Schulz, whose BF16 roundings would turn
    differences in the last bit into larger ones.
    """
    batch = open_data(experiment.data).train_batch(0)
    model = dataclasses.replace(experiment.model, num_layers=1, num_dense_layers=0, mixer_pattern=("gated_mla",))
    results = []
    for microbatches in (1, 2):
        optimizer = OptimizerConfig(microbatches=microbatches, muon=MuonConfig(newton_schulz_dtype="float32"))
        assembly = assemble(dataclasses.replace(experiment, model=model, optimizer=optimizer), 256)
        step = assembly.train_step.lower(assembly.target, assembly.batch).compile(QUICK_COMPILE)
        results.append(step(assembly.init(), assembly.put(batch)))
    (whole, whole_metrics), (split, split_metrics) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), whole.params, split.params)
    biases = [leaf for path, leaf in jax.tree.leaves_with_path(whole.params) if "router_bias" in jax.tree_util.keystr(path)]
    assert biases and all(np.abs(bias).max() > 1e-3 for bias in biases)  # they moved, and by the same
    for name in ("expert_load_max_over_mean", "max_logit", "loss"):
        np.testing.assert_allclose(whole_metrics[name], split_metrics[name], rtol=1e-5, err_msg=name)


def test_evidence_goes_to_the_parameters_that_it_concerns(tiny_model: ModelConfig):
    """Layer 1 is the only one with experts, and the only one with attention; shards' histograms add up."""
    aux = {
        "histogram": jnp.arange(24).reshape(1, 3, 8, 1),
        "expert_load": jnp.arange(8)[None],
        "max_logit": jnp.array([[1.0, 2.0]]),
        "finite": jnp.array([True, True]),
    }
    given = evidence(aux, tiny_model)
    assert set(given) == {"histograms", "loads", "max_logits"}
    ((bias, histogram),), ((bias_too, load),), ((query, logits),) = (list(given[name].items()) for name in given)
    assert bias == bias_too and bias[-2:] == ("ffn", "router_bias") and query[-2:] == ("mixer", "q_up") and bias[:3] == query[:3]
    np.testing.assert_array_equal(histogram[0, :, 0], np.arange(24).reshape(3, 8).sum(0))
    assert load.shape == (1, 8) and logits.shape == (1, 2)
    assert evidence({}, tiny_model) == {"histograms": {}, "loads": {}, "max_logits": {}}
