"""Parameter and FLOP counts against hand counts and the golden trace of Attention Residuals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from k3train.config import KDAConfig, LatentMoEConfig, MLAConfig, ModelConfig
from k3train.models import flops, stacks
from k3train.models.parameters import abstract
from tests.golden import load

D, V, F = 16, 32, 24
SMALL = ModelConfig(
    vocab_size=V, d_model=D, num_layers=4, dense_dim=F, attn_res_block_size=2,
    kda=KDAConfig(num_heads=2, head_dim=8),
    mla=MLAConfig(num_heads=3, q_lora_rank=10, kv_lora_rank=6, nope_head_dim=8, rope_head_dim=4, v_head_dim=5),
    moe=LatentMoEConfig(num_experts=8, experts_per_token=2, latent_dim=12, expert_dim=7, num_shared_experts=2),
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
