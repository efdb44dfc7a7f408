"""Parameter and FLOP counts against hand counts and the golden trace of Attention Residuals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments import kimi_k2_like
from k3train.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.models import flops, stacks
from k3train.models.parameters import abstract
from tests.golden import load

D, V, F = 16, 32, 24
SMALL = ModelConfig(
    vocab_size=V, d_model=D, num_layers=4, dense_dim=F, attn_res_block_size=2,
    kda=KDAConfig(num_heads=2, head_dim=8),
    mla=MLAConfig(num_heads=3, q_lora_rank=10, kv_lora_rank=6, nope_head_dim=8, rope_head_dim=4, v_head_dim=5),
    moe=MoEConfig(num_experts=8, experts_per_token=2, latent_dim=12, expert_dim=7, num_shared_experts=2),
)  # fmt: skip


def count(config: ModelConfig, sequence_length: int) -> dict[str, flops.Part]:
    return flops.parts(stacks.unstack(abstract(config)[1], config), config, sequence_length)


def test_every_part_by_hand():
    T = 40
    by_part = count(SMALL, T)
    kda_matmuls = 3 * (4 * D * 16 + 3 * 16 * 4 + D * 2 + D * 8 + 8 * 16 + 16 * D)  # q k v gate, convolutions, beta, decay, output
    kda_state = 3 * 2 * (6 * 8 * 8 + T * 5 * 8 + T * T // 3)
    mla_matmuls = D * 10 + 10 * 3 * 12 + D * (6 + 4) + 6 * 3 * 13 + 2 * D * 3 * 5
    moe = dict(total=3 * 8 * 3 * 12 * 7, active=3 * 2 * 3 * 12 * 7)
    expected = {
        "embedding": (V * D, 0, 0),
        "kda": (kda_matmuls + 3 * (2 + 16 + 8), kda_matmuls + 3 * (2 + 16 + 8), 2 * kda_matmuls + kda_state),
        "gated_mla": (mla_matmuls + 16, mla_matmuls + 16, 2 * mla_matmuls + 3 * (T + 1) * (12 + 5)),
        # Mixes: layer 0 embedding + sum; layer 1 two; layer 2 two, then three; layer 3 three; output three.
        "attention_residuals": (9 * 2 * D, 9 * 2 * D, 4 * D * (2 + 2 + 2 + 2 + 3 + 3 + 3 + 3)),
        "dense_feed_forward": (3 * D * F, 3 * D * F, 6 * D * F),
        "routed_experts": (moe["total"], moe["active"], 2 * moe["active"]),
        "shared_experts": (3 * 3 * D * 14, 3 * 3 * D * 14, 6 * 3 * D * 14),
        "router": (3 * (D * 8 + 8), 3 * (D * 8 + 8), 2 * 3 * D * 8),
        "latent_projections": (3 * (2 * D * 12 + 12), 3 * (2 * D * 12 + 12), 2 * 3 * 2 * D * 12),
        "norms": (9 * D, 9 * D, 0),
        "head": (D * V, D * V, 2 * D * V),
    }
    assert {name: (part.total, part.active, part.forward_flops) for name, part in by_part.items()} == expected
    assert flops.whole(by_part).total == sum(total for total, _, _ in expected.values())


def test_sources_of_every_mix_are_those_of_the_golden_trace():
    golden = load("attnres_trace")
    config = dataclasses.replace(SMALL, num_layers=7, attn_res_block_size=3)
    np.testing.assert_array_equal(flops.attention_residual_sources(config), golden["mix_num_sources"])


def test_released_model_has_186_mixes_and_nine_sources_at_the_end():
    sources = flops.attention_residual_sources(ModelConfig())
    assert (len(sources), sources[-1], max(sources)) == (186, 9, 9)


@pytest.mark.parametrize("shared", [0, 1])
def test_models_without_some_parts(shared):
    config = dataclasses.replace(SMALL, num_dense_layers=0, moe=dataclasses.replace(SMALL.moe, num_shared_experts=shared))
    by_part = count(config, 40)
    assert ("dense_feed_forward" in by_part, "shared_experts" in by_part) == (False, shared == 1)


@pytest.mark.parametrize(("depth", "sources"), [("full_attention_residuals", [2, 3, 4, 5, 6, 7, 8, 9]), ("residual", [])])
def test_other_depths(depth, sources):
    config = dataclasses.replace(SMALL, depth=depth)
    assert flops.attention_residual_sources(config) == sources
    by_part = count(config, 40)
    assert ("attention_residuals" in by_part) == bool(sources)
    if sources:
        assert by_part["attention_residuals"].forward_flops == 4 * D * sum(sources)


def test_experts_on_the_full_width_have_no_latent():
    config = dataclasses.replace(SMALL, width="moe", activation="swiglu")
    by_part = count(config, 40)
    assert "latent_projections" not in by_part
    experts = flops.Part(total=3 * 8 * 3 * D * 7, active=3 * 2 * 3 * D * 7, forward_flops=2 * 3 * 2 * 3 * D * 7)
    assert by_part["routed_experts"] == experts


def test_kimi_k2_like():
    """The published shape, counted by hand: 1.026 T parameters, 31.7 B active without the embedding table."""
    config = kimi_k2_like.experiment().validate().model
    by_part = count(config, 4096)
    whole = flops.whole(by_part)
    attention = 7168 * 1536 + 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 + 512 * 64 * 256 + 64 * 128 * 7168
    expert, router = 3 * 7168 * 2048, 7168 * 384 + 384
    outside = 163840 * 7168  # embedding or head
    shared = 61 * attention + 3 * 7168 * 18432 + 60 * (expert + router) + (2 * 61 + 1) * 7168 + outside
    assert whole.total == shared + 60 * 384 * expert + outside
    assert whole.active == shared + 60 * 8 * expert
    assert whole.total == pytest.approx(1.04e12, rel=0.02) and whole.active == pytest.approx(32.6e9, rel=0.03)
    pairs = by_part["mla_rope"].forward_flops - 2 * 61 * (attention - 1536 - 512)
    assert pairs == 61 * 64 * 4097 * (192 + 128)
