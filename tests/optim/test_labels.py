"""The label of every leaf of the released model, of K2's kinds of layers, and under each option."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from k3train.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, MuonConfig, OptimizerConfig
from k3train.models import parameters
from k3train.optim import labels
from k3train.optim.labels import is_axes
from k3train.optim.paths import by_path

MUON, PER_HEAD, ADAMW, NO_DECAY, BALANCE = "muon", "muon_per_head", "adamw", "adamw_no_decay", "balance"
FILE = Path(__file__).resolve().parents[2] / "experiments" / "kimi_k3_2p8t.py"

# Every leaf by its module and name, whatever its layer.
RELEASED = {
    "embed": {"embedding": ADAMW},
    "head": {"kernel": ADAMW},
    **dict.fromkeys(("norm", "mixer_norm", "ffn_norm"), {"scale": NO_DECAY}),
    **dict.fromkeys(("output_res", "mixer_res", "ffn_res"), {"key_norm": NO_DECAY, "query": NO_DECAY}),
    "mixer": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), PER_HEAD),  # KDA
        **dict.fromkeys(("gate_proj", "decay_down", "decay_up", "out_proj"), MUON),  # the gate and output of both mixers
        **dict.fromkeys(("beta_proj", "q_conv", "k_conv", "v_conv"), ADAMW),
        **dict.fromkeys(("a_log", "dt_bias", "out_norm"), NO_DECAY),
        **dict.fromkeys(("q_up", "k_up", "v_up"), PER_HEAD),  # MLA
        **dict.fromkeys(("q_down", "kv_down"), MUON),
        **dict.fromkeys(("q_norm", "kv_norm"), NO_DECAY),
    },
    "ffn": {
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MUON),  # dense
        **dict.fromkeys(("router", "latent_down", "latent_up", "w_gate", "w_up", "w_down"), MUON),
        "router_bias": BALANCE,
        "latent_norm": NO_DECAY,
    },
    "shared": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MUON),
}


def flat(config: OptimizerConfig, axes: dict) -> dict[tuple[str, ...], str]:
    return by_path(labels(axes, config))


def by_table(axes: dict, table: dict) -> dict[tuple[str, ...], str]:
    return {path: table[path[-2]][path[-1]] for path in by_path(axes, is_axes)}


@pytest.fixture(scope="module")
def released() -> dict:
    """Axes of the released model, without an array."""
    spec = importlib.util.spec_from_file_location("released", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return parameters.abstract(module.experiment().model)[2]


def small(**fields) -> dict:
    return parameters.abstract(
        ModelConfig(
            vocab_size=17, d_model=8, num_layers=4, dense_dim=8, attn_res_block_size=4,
            kda=KDAConfig(num_heads=2, head_dim=4),
            mla=MLAConfig(num_heads=2, q_lora_rank=4, kv_lora_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4),
            moe=MoEConfig(num_experts=4, experts_per_token=2, latent_dim=4, expert_dim=4),
            **fields,
        )
    )[2]  # fmt: skip


def test_every_leaf_of_the_released_model(released: dict):
    """Each leaf is looked up by name, so that a new one without a line in the table fails here, as does a line without a leaf."""
    found = flat(OptimizerConfig(), released)
    assert found == by_table(released, RELEASED)
    named = {path[-2:] for path in found}
    assert named == {(module, name) for module, leaves in RELEASED.items() for name in leaves}
    assert len(found) > 500 and set(Counter(found.values())) == {MUON, PER_HEAD, ADAMW, NO_DECAY, BALANCE}


def test_per_head_gates(released: dict):
    """Of both mixers, and not the gates of the feed-forward blocks, which have no heads."""
    table = {**RELEASED, "mixer": {**RELEASED["mixer"], "gate_proj": PER_HEAD, "decay_up": PER_HEAD}}
    assert flat(OptimizerConfig(muon=MuonConfig(per_head_gates=True)), released) == by_table(released, table)


def test_matrices_under_adamw(released: dict):
    """Only the matrices change their rule."""
    rule = {MUON: ADAMW, PER_HEAD: ADAMW}
    table = {module: {name: rule.get(label, label) for name, label in leaves.items()} for module, leaves in RELEASED.items()}
    assert flat(OptimizerConfig(matrices="adamw"), released) == by_table(released, table)


@pytest.mark.parametrize(
    "fields",
    [
        {"mixer_pattern": ("mla_rope",), "last_mixer": None, "depth": "residual", "width": "moe", "activation": "swiglu"},
        {"depth": "full_attention_residuals", "width": "dense"},
    ],
)
def test_other_kinds_of_layers(fields: dict):
    """Experts on the full width, rotary attention and plain residuals add no name that the table lacks."""
    axes = small(**fields)
    assert flat(OptimizerConfig(), axes) == by_table(axes, RELEASED)


def test_stacks_do_not_make_matrices():
    axes = {
        "scale": ("layers", "norm"),
        "dt_bias": ("layers", "heads", "head_dim"),
        "latent_norm": ("layers", "experts", "latent"),
        "router": ("layers", "embed", "experts"),
    }
    expected = {"scale": NO_DECAY, "dt_bias": NO_DECAY, "latent_norm": NO_DECAY, "router": MUON}
    assert labels(axes, OptimizerConfig()) == expected
