"""Weights of a Hugging Face folder: what is read, what is refused, and that writing is the inverse of reading."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from k3train.errors import UserError
from k3train.interop import hugging_face
from tests.golden import FOLDER

GOLDEN = FOLDER / "model_tiny"
CONFIG = hugging_face.read_config(GOLDEN)
A_LOG = "language_model.model.layers.0.self_attn.A_log"
ROUTER = "language_model.model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight"

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def abstract_once():
    """The same shapes for every test of this file; working them out takes most of a read's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "abstract", functools.lru_cache(hugging_face.abstract))
        yield


@pytest.fixture(scope="module")
def canonical(abstract_once):
    return hugging_face.read_checkpoint(GOLDEN, CONFIG)


def changed_copy(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The golden model with some tensors changed."""
    tensors = load_file(GOLDEN / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(GOLDEN / "config.json", folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        hugging_face.read_checkpoint(folder, CONFIG)
    return str(caught.value)


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_reads_float32_arrays_with_our_axes(canonical):
    tensors = load_file(GOLDEN / "model.safetensors")
    mixer, ffn = canonical["layers"]["3"]["mixer"], canonical["layers"]["2"]["ffn"]
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(canonical))
    assert canonical["layers"]["0"]["mixer"]["a_log"].shape == (4,)
    q_up = tensors["language_model.model.layers.3.self_attn.q_b_proj.weight"]  # rows: per head, then channel
    np.testing.assert_array_equal(mixer["q_up"][:, 2, 5], q_up[2 * 24 + 5])
    kv_up = tensors["language_model.model.layers.3.self_attn.kv_b_proj.weight"]  # rows: per head keys, then values
    assert mixer["k_up"].shape == mixer["v_up"].shape == (16, 4, 16)
    np.testing.assert_array_equal(mixer["k_up"][:, 2, 5], kv_up[2 * 32 + 5])
    np.testing.assert_array_equal(mixer["v_up"][:, 2, 5], kv_up[2 * 32 + 16 + 5])
    o_proj = tensors["language_model.model.layers.3.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(mixer["out_proj"][1, 7], o_proj[:, 16 + 7])
    np.testing.assert_array_equal(ffn["w_down"][7], tensors[EXPERT].T)


@pytest.mark.parametrize("shard_bytes, files", [(2**40, 1), (800_000, 4)])
def test_writing_and_reading_give_the_same(canonical, tmp_path, shard_bytes, files):
    hugging_face.write_checkpoint(tmp_path, CONFIG, canonical, shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert hugging_face.is_checkpoint(tmp_path)
    assert hugging_face.read_config(tmp_path) == CONFIG
    assert_same(hugging_face.read_checkpoint(tmp_path, CONFIG), canonical)


def test_written_names_are_the_released_ones(canonical, tmp_path):
    hugging_face.write_checkpoint(tmp_path, CONFIG, canonical)
    written, released = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / "model.safetensors")
    assert set(written) == set(released)
    for name, tensor in released.items():
        np.testing.assert_array_equal(written[name], tensor[:4] if name.endswith("A_log") else tensor, err_msg=name)


def test_writing_refuses_a_folder_with_a_model(canonical, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(UserError, match="already holds config.json"):
        hugging_face.write_checkpoint(tmp_path, CONFIG, canonical)
    assert (tmp_path / "config.json").read_text() == "mine"
    assert not list(tmp_path.glob("*.safetensors"))


def test_names_without_prefix_unpadded_a_log_and_vision_tensors(canonical, tmp_path):
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            tensors[name.removeprefix("language_model.")] = tensor[:4] if name.endswith("A_log") else tensor
        tensors["vision_tower.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)

    assert_same(hugging_face.read_checkpoint(changed_copy(tmp_path, change), CONFIG), canonical)


def test_bfloat16_weights_become_float32(canonical, tmp_path):
    def change(tensors: Tensors) -> None:
        tensors |= {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}

    read = hugging_face.read_checkpoint(changed_copy(tmp_path, change), CONFIG)
    rounded = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), canonical)
    assert_same(read, rounded)


def test_written_bfloat16_is_stored_as_such(canonical, tmp_path):
    hugging_face.write_checkpoint(tmp_path, CONFIG, jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), canonical))
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.get_slice(EXPERT).get_dtype() == "BF16"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_missing_tensors_are_named_with_their_shape(tmp_path):
    message = refusal(changed_copy(tmp_path, lambda tensors: (tensors.pop(EXPERT), tensors.pop(ROUTER))))
    assert f"{EXPERT} (expected shape [32, 24]): missing" in message
    assert f"{ROUTER} (expected shape [16, 64]): missing" in message


def test_misshapen_tensor_is_named_with_file_and_both_shapes(tmp_path):
    message = refusal(changed_copy(tmp_path, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].T.copy()})))
    assert f"{ROUTER} (model.safetensors): has shape [64, 16], expected [16, 64]" in message


def test_unexpected_tensor_is_named(tmp_path):
    extra = "language_model.model.layers.9.input_layernorm.weight"
    message = refusal(changed_copy(tmp_path, lambda tensors: tensors.update({extra: np.zeros(64, np.float32)})))
    assert f"{extra} (model.safetensors): unexpected" in message


def test_unexpected_tensor_without_prefix_beside_prefixed_ones(canonical, tmp_path):
    extras = {"vision_tower.norm.weight": np.zeros(2, np.float32), "mm_projector.0.weight": np.zeros(2, np.float32)}
    assert_same(hugging_face.read_checkpoint(changed_copy(tmp_path, lambda tensors: tensors.update(extras)), CONFIG), canonical)
    extras["model.adapter.weight"] = np.zeros(2, np.float32)
    message = refusal(changed_copy(tmp_path, lambda tensors: tensors.update(extras)))
    assert "model.adapter.weight (model.safetensors): unexpected" in message
    assert "vision_tower" not in message and "mm_projector" not in message


def test_tensor_of_two_leaves_is_named_once(tmp_path):
    name = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    message = refusal(changed_copy(tmp_path, lambda tensors: tensors.pop(name)))
    assert message.count(name) == 1 and f"{name} (expected shape [128, 16]): missing" in message


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mixer_pattern": ("mla_rope",), "last_mixer": None}, "model.mixer_pattern has mla_rope: only kda, gated_mla can be stored"),
        ({"depth": "residual"}, "model.depth has residual: only block_attention_residuals"),
        ({"width": "moe"}, "model.width has moe: only latent_moe"),
        ({"activation": "swiglu"}, "model.activation has swiglu: only situ_glu"),
        ({"moe": dataclasses.replace(CONFIG.moe, routed_scaling=2.5)}, "model.moe.routed_scaling has 2.5: only 1.0"),
    ],
)
def test_other_models_have_no_released_names(tmp_path, fields, message):
    config = dataclasses.replace(CONFIG, **fields)
    for use in (
        lambda: hugging_face.write_checkpoint(tmp_path / "new", config, {}),
        lambda: hugging_face.read_checkpoint(GOLDEN, config),
        lambda: hugging_face.write_config(tmp_path / "config.json", config, "float32"),
    ):
        with pytest.raises(UserError, match="no place for this model") as caught:
            use()
        assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_integer_tensor_is_refused(tmp_path):
    message = refusal(changed_copy(tmp_path, lambda tensors: tensors.update({ROUTER: np.zeros((16, 64), np.int32)})))
    assert ROUTER in message and "has type I32" in message


def test_quantized_experts_are_named_as_such(tmp_path):
    def change(tensors: Tensors) -> None:
        tensors[EXPERT + "_packed"] = tensors.pop(EXPERT).astype(np.uint8)

    assert f"{EXPERT} (expected shape [32, 24]): stored quantized" in refusal(changed_copy(tmp_path, change))


@pytest.mark.parametrize("value, message", [(np.ones(16), "the rest is not zero"), (np.zeros(3), r"has shape [3], expected [4]")])
def test_a_log_must_be_the_heads_and_zeros(tmp_path, value, message):
    assert message in refusal(changed_copy(tmp_path, lambda tensors: tensors.update({A_LOG: value.astype(np.float32)})))


def test_truncated_file_is_named(tmp_path):
    shutil.copy(GOLDEN / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "model.safetensors").read_bytes()[:100_000])
    assert f"{tmp_path / 'model.safetensors'}: not a readable safetensors file" in refusal(tmp_path)


def test_missing_shard_is_named(canonical, tmp_path):
    hugging_face.write_checkpoint(tmp_path, CONFIG, canonical, shard_bytes=800_000)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    assert "model-00002-of-00004.safetensors: missing, though model.safetensors.index.json names it" in refusal(tmp_path)


def test_index_that_is_no_index(canonical, tmp_path):
    hugging_face.write_checkpoint(tmp_path, CONFIG, canonical, shard_bytes=800_000)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "not an index of safetensors files" in refusal(tmp_path)


@pytest.mark.parametrize("file", [3, None, ["a"], "", "..", "../model.safetensors", "/model.safetensors", "a\\b", "C:x", "a\0"])
def test_index_names_plain_files_alone(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {ROUTER: file}}))
    assert f"weight_map.{ROUTER} = {json.dumps(file)}: must be the plain name of a file" in refusal(tmp_path)


def test_index_whose_map_is_a_list(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [[ROUTER, "model.safetensors"]]}))
    assert "weight_map is not an object" in refusal(tmp_path)


def test_folder_without_weights(tmp_path):
    assert "holds no *.safetensors file" in refusal(tmp_path)
