"""The released `config.json` and `ModelConfig`, one from the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train import config_io
from k3train.config import Experiment, Mixer, MLAConfig, ModelConfig
from k3train.errors import UserError
from k3train.interop.hugging_face_names import check_released

Json = dict[str, Any]

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "intermediate_size": "dense_dim",
    "attn_res_block_size": "attn_res_block_size",
    "rms_norm_eps": "norm_eps",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
    "initializer_range": "init_std",
    "linear_attn_config.num_heads": "kda.num_heads",
    "linear_attn_config.head_dim": "kda.head_dim",
    "linear_attn_config.short_conv_kernel_size": "kda.conv_width",
    "linear_attn_config.gate_lower_bound": "kda.gate_lower_bound",
    "num_attention_heads": "mla.num_heads",
    "q_lora_rank": "mla.q_lora_rank",
    "kv_lora_rank": "mla.kv_lora_rank",
    "qk_nope_head_dim": "mla.nope_head_dim",
    "qk_rope_head_dim": "mla.rope_head_dim",
    "v_head_dim": "mla.v_head_dim",
    "num_experts": "moe.num_experts",
    "num_experts_per_token": "moe.experts_per_token",
    "routed_expert_hidden_size": "moe.latent_dim",
    "moe_intermediate_size": "moe.expert_dim",
    "num_shared_experts": "moe.num_shared_experts",
}
"""Released field to ours; a dot goes one level down."""

FIXED = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config.use_full_rank_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
}
"""What the published model does and this one too; another value, or none, is a model that k3train does not have."""

FIXED_IF_PRESENT = {
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""The same, where leaving the field out means this value."""

LATENT_NORM_EPS = MLAConfig().latent_norm_eps


def describes_model(folder: Path) -> bool:
    """Whether the folder has a `config.json` as Hugging Face models have it, of this architecture or another; False if unreadable."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and any(name in data for name in ("model_type", "architectures", "text_config"))


def read_config(folder: Path) -> ModelConfig:
    """The model that a folder's `config.json` describes; its text fields may be nested under `text_config`.

    Dtypes and rematerialisation, which the file does not decide, take their defaults.

    Raises:
        UserError: the file is missing or unreadable, lacks a field, or asks for something that k3train does not implement.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    text = data.get("text_config", data) if isinstance(data, dict) else data
    if not isinstance(text, dict):
        raise UserError(f"{path}: the model's fields must be a JSON object")
    problems = _unsupported(text)
    missing = [name for name in FIELDS if _get(text, name) is None]
    if "linear_attn_config.gate_lower_bound" in missing:
        missing.remove("linear_attn_config.gate_lower_bound")
        problems.append("linear_attn_config.gate_lower_bound is not set: the unbounded decay gate before K3 is not supported")
    problems += [f"{name}: missing" for name in missing]
    if problems:
        raise UserError(f"{path} is not a Kimi K3 text model that k3train can run:\n" + "\n".join(f"  {problem}" for problem in problems))

    ours: Json = {}
    for theirs, name in FIELDS.items():
        _set(ours, name, _get(text, theirs))
    where = f"{path} (released names replaced by k3train's)"
    config = config_io.from_dict(ModelConfig, ours | _pattern(_mixers(text, path)), where)
    try:
        return Experiment(name="model", model=config).validate().model
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def write_config(path: Path, config: ModelConfig, dtype: str) -> None:
    """Writes `config.json` as the published text model has it; `dtype` names the float type of the weights.

    Raises:
        UserError: the format has no field for what the configuration asks.
    """
    check_released(config)
    if config.mla.latent_norm_eps != LATENT_NORM_EPS:
        raise UserError(f"model.mla.latent_norm_eps = {config.mla.latent_norm_eps}: the Hugging Face model always uses {LATENT_NORM_EPS}")
    ours = config_io.to_dict(config)
    data: Json = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": dtype}
    for theirs, name in FIELDS.items():
        _set(data, theirs, _get(ours, name))
    for theirs, value in (FIXED | FIXED_IF_PRESENT).items():
        _set(data, theirs, value)
    data["num_key_value_heads"] = config.mla.num_heads
    for name, kind in (("kda_layers", "kda"), ("full_attn_layers", "gated_mla")):
        data["linear_attn_config"][name] = [layer for layer, mixer in enumerate(config.mixers, 1) if mixer == kind]
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _unsupported(text: Json) -> list[str]:
    """Every field whose value means a model that k3train does not have."""
    problems = []
    for name, value in (FIXED | FIXED_IF_PRESENT).items():
        found = _get(text, name)
        if found != value and not (found is None and name in FIXED_IF_PRESENT):
            problems.append(f"{name} = {json.dumps(found)}: only {json.dumps(value)} is supported")
    count = text.get("num_hidden_layers")
    if count is not None and type(count) is not int:  # true is an int too
        problems.append(f"num_hidden_layers must be a whole number, found {json.dumps(count)}")
    key_heads, heads = text.get("num_key_value_heads"), text.get("num_attention_heads")
    if key_heads not in (None, heads):
        problems.append(f"num_key_value_heads = {key_heads}: must equal num_attention_heads = {heads}")
    return problems


def _mixers(text: Json, path: Path) -> tuple[Mixer, ...]:
    """The mixer of every layer, from the two lists of layers counted from 1."""
    kda, mla = (_get(text, f"linear_attn_config.{name}") for name in ("kda_layers", "full_attn_layers"))
    named = [*kda, *mla] if isinstance(kda, list) and isinstance(mla, list) else []
    count = text["num_hidden_layers"]
    whole = all(isinstance(layer, int) for layer in named)
    # Lengths first: a range as long as a mistyped count may not fit in memory.
    if not whole or len(named) != count or sorted(named) != list(range(1, count + 1)):
        raise UserError(
            f"{path}: linear_attn_config.kda_layers and full_attn_layers must name each of the num_hidden_layers = {count} layers once,"
            " counted from 1"
        )
    kda_layers = set(kda)
    return tuple("kda" if layer in kda_layers else "gated_mla" for layer in range(1, count + 1))


def _pattern(mixers: tuple[Mixer, ...]) -> Json:
    """The shortest repeated pattern, with or without an exception for the last layer."""
    for length in range(1, len(mixers) + 1):
        repeated = tuple(mixers[layer % length] for layer in range(len(mixers)))
        if repeated == mixers:
            return {"mixer_pattern": mixers[:length], "last_mixer": None}
        if repeated[:-1] == mixers[:-1]:
            return {"mixer_pattern": mixers[:length], "last_mixer": mixers[-1]}
    return {"mixer_pattern": mixers, "last_mixer": None}


def _get(data: Json, name: str) -> Any:
    for part in name.split("."):
        data = data.get(part) if isinstance(data, dict) else None  # type: ignore[assignment]
    return data


def _set(data: Json, name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
    data[last] = value
