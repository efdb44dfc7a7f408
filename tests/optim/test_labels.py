"""The label of every leaf of a model with all mechanisms, and the updates that follow from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.config import KDAConfig, LatentMoEConfig, MLAConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from k3train.models import parameters
from k3train.optim import build_optimizer, labels

RESIDUAL = {"key_norm": "adamw_no_decay", "query": "adamw_no_decay"}
NORM = {"scale": "adamw_no_decay"}
GLU = {"gate_proj": "adamw", "up_proj": "adamw", "down_proj": "adamw"}
KDA = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "beta_proj", "decay_down", "decay_up", "out_proj"), "adamw"),
    **dict.fromkeys(("q_conv", "k_conv", "v_conv"), "adamw"),
    **dict.fromkeys(("a_log", "dt_bias", "out_norm"), "adamw_no_decay"),
}
MLA = {
    **dict.fromkeys(("q_down", "q_up", "kv_down", "kv_up", "gate_proj", "out_proj"), "adamw"),
    **dict.fromkeys(("q_norm", "kv_norm"), "adamw_no_decay"),
}
MOE = {
    **dict.fromkeys(("router", "latent_down", "latent_up", "w_gate", "w_up", "w_down"), "adamw"),
    "router_bias": "frozen",
    "latent_norm": "adamw_no_decay",
    "shared": GLU,
}


def layer(mixer: dict, ffn: dict) -> dict:
    return {"mixer_res": RESIDUAL, "mixer_norm": NORM, "mixer": mixer, "ffn_res": RESIDUAL, "ffn_norm": NORM, "ffn": ffn}


@pytest.fixture(scope="module")
def axes() -> dict:
    """Layers 1 and 2 are a stack of two, the others stacks of one."""
    config = ModelConfig(
        vocab_size=17,
        d_model=8,
        num_layers=5,
        mixer_pattern=("kda", "kda", "kda", "gated_mla"),
        dense_dim=8,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=2, head_dim=4),
        mla=MLAConfig(num_heads=2, q_lora_rank=4, kv_lora_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4),
        moe=LatentMoEConfig(num_experts=4, experts_per_token=2, latent_dim=4, expert_dim=4),
    )
    return parameters.abstract(config)[2]


def test_every_leaf_has_its_label(axes: dict):
    assert labels(axes) == {
        "embed": {"embedding": "adamw"},
        "groups": {0: {0: layer(KDA, GLU)}, 1: {0: layer(KDA, MOE)}, 2: {0: layer(MLA, MOE)}, 3: {0: layer(MLA, MOE)}},
        "output_res": RESIDUAL,
        "norm": NORM,
        "head": {"kernel": "adamw"},
    }


def test_updates_follow_the_labels():
    """Without gradients, decay is all that moves a parameter; frozen ones stay under any gradient."""
    axes = {"kernel": ("layers", "embed", "mlp"), "dt_bias": ("layers", "heads", "head_dim"), "router_bias": ("layers", "experts")}
    params = {name: jnp.full((2, 3, 4)[: len(names)], 2.0) for name, names in axes.items()}
    optimizer = build_optimizer(OptimizerConfig(peak_lr=0.1, weight_decay=0.5), ScheduleConfig(steps=10, warmup_fraction=0.1), axes)

    def update(gradient: float) -> dict:
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    still, moved = update(0.0), update(1.0)
    np.testing.assert_allclose(still["kernel"], -0.1 * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(still["dt_bias"], 0.0)
    np.testing.assert_allclose(moved["dt_bias"], -0.1, rtol=1e-5)
    np.testing.assert_array_equal(moved["router_bias"], 0.0)


def test_the_clip_acts_on_the_norm_over_all_leaves():
    """A gradient of norm 5 clipped to 1 gives the moments of its fifth."""
    axes = {"a": ("embed",), "b": ("embed", "mlp")}
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    optimizer = build_optimizer(OptimizerConfig(clip_norm=1.0, beta1=0.0), ScheduleConfig(), axes)
    _, state = optimizer.update(grads, optimizer.init(grads), grads)
    moments = {path: leaf for path, leaf in optax.tree.get_all_with_path(state, "mu")}
    clipped = sorted(float(leaf.squeeze()) for leaf in jax.tree.leaves(list(moments.values())))
    assert clipped == pytest.approx([0.6, 0.8])
