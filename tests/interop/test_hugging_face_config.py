"""`config.json` as released, read into a `ModelConfig` and refused where k3train has no such model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from k3train.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.errors import UserError
from k3train.interop.hugging_face_config import read_config, write_config
from tests.golden import FOLDER

GOLDEN = FOLDER / "model_tiny" / "config.json"
ABSENT = object()


def written(folder: Path, changes: dict[str, object]) -> Path:
    """The golden config with dotted fields changed, or taken out."""
    data = json.loads(GOLDEN.read_text())
    for name, value in changes.items():
        node = data
        *parents, last = name.split(".")
        for parent in parents:
            node = node[parent]
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_golden_config():
    assert read_config(GOLDEN.parent) == ModelConfig(
        vocab_size=256, d_model=64, num_layers=9, dense_dim=96, attn_res_block_size=4,
        kda=KDAConfig(num_heads=4, head_dim=16),
        mla=MLAConfig(num_heads=4, q_lora_rank=24, kv_lora_rank=16, nope_head_dim=16, rope_head_dim=8, v_head_dim=16),
        moe=MoEConfig(num_experts=16, experts_per_token=4, latent_dim=32, expert_dim=24),
    )  # fmt: skip


def test_fields_under_text_config(tmp_path):
    data = json.loads(GOLDEN.read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": data, "vision_config": {}}))
    assert read_config(tmp_path) == read_config(GOLDEN.parent)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(),
        ModelConfig(num_layers=8, last_mixer=None, mixer_pattern=("kda", "gated_mla")),
        ModelConfig(num_layers=7, mixer_pattern=("gated_mla",), last_mixer=None),
        ModelConfig(num_layers=7, mixer_pattern=("kda", "gated_mla", "gated_mla", "kda", "kda", "kda", "gated_mla"), last_mixer=None),
        ModelConfig(num_dense_layers=3, moe=MoEConfig(num_shared_experts=0), kda=KDAConfig(gate_lower_bound=-2.5), situ_beta=3.0),
    ],
)
def test_written_config_reads_back(tmp_path, model):
    write_config(tmp_path / "config.json", model, "float32")
    read = read_config(tmp_path)
    assert read.mixers == model.mixers
    assert dataclasses.replace(read, mixer_pattern=model.mixer_pattern, last_mixer=model.last_mixer) == model


def test_layer_lists_of_the_released_model(tmp_path):
    write_config(tmp_path / "config.json", ModelConfig(), "bfloat16")
    lists = json.loads((tmp_path / "config.json").read_text())["linear_attn_config"]
    assert lists["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(lists["kda_layers"]) == 69
    assert (read_config(tmp_path).mixer_pattern, read_config(tmp_path).last_mixer) == (("kda", "kda", "kda", "gated_mla"), "gated_mla")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "silu"}, 'hidden_act = "silu": only "situ" is supported'),
        ({"hidden_act": ABSENT}, 'hidden_act = null: only "situ" is supported'),
        ({"mla_use_nope": False}, "mla_use_nope = false: only true is supported"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate = false"),
        ({"linear_attn_config.use_full_rank_gate": False}, "linear_attn_config.use_full_rank_gate = false"),
        ({"linear_attn_config.gate_lower_bound": ABSENT}, "gate_lower_bound is not set: the unbounded decay gate"),
        ({"linear_attn_config.gate_lower_bound": -8.0}, "gate_lower_bound = -8.0: must be in [-5, 0)"),
        ({"num_expert_group": 8}, "num_expert_group = 8: only 1 is supported"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func = "softmax"'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true: only false is supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: must equal num_attention_heads = 4"),
        ({"vocab_size": ABSENT, "q_lora_rank": None}, "vocab_size: missing"),
        ({"hidden_size": "wide"}, "d_model = 'wide': must be a whole number"),
        ({"hidden_size": -64}, "model.d_model = -64: must be greater than zero"),
        ({"linear_attn_config.kda_layers": [0, 1, 2, 4, 5, 6]}, "must name each of the num_hidden_layers = 9 layers once, counted from 1"),
        ({"linear_attn_config.full_attn_layers": "all"}, "must name each of the num_hidden_layers = 9 layers once"),
        ({"num_hidden_layers": 1_000_000_000}, "must name each of the num_hidden_layers = 1000000000 layers once"),
        ({"num_hidden_layers": -1}, "must name each of the num_hidden_layers = -1 layers once"),
        ({"num_hidden_layers": "4"}, 'num_hidden_layers must be a whole number, found "4"'),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, found true"),
        ({"linear_attn_config": 3}, "linear_attn_config.num_heads: missing"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        read_config(written(tmp_path, changes))
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        read_config(written(tmp_path, {"hidden_act": "silu", "vocab_size": ABSENT, "topk_group": 4}))
    assert all(name in str(caught.value) for name in ("hidden_act", "vocab_size", "topk_group"))


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[]", "must be a JSON object"), ('{"text_config": 3}', "JSON object")])
def test_files_that_are_no_config(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)


def test_latent_norm_eps_that_the_format_cannot_say(tmp_path):
    with pytest.raises(UserError, match="latent_norm_eps"):
        write_config(tmp_path / "config.json", ModelConfig(mla=MLAConfig(latent_norm_eps=1e-5)), "float32")
