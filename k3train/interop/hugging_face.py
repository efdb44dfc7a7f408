"""Hugging Face folders (`config.json` and `*.safetensors`, names as in the released checkpoint) to and from canonical parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from k3train.config import ModelConfig
from k3train.errors import UserError
from k3train.interop.hugging_face_config import describes_model, read_config, write_config
from k3train.interop.hugging_face_names import PREFIX, Stored, check_released, gathered, keys_of, stored, tensors
from k3train.models.parameters import abstract
from k3train.models.stacks import unstack

__all__ = ["describes_model", "is_checkpoint", "read_checkpoint", "read_config", "write_checkpoint"]

INDEX = "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
DTYPE_NAMES = {np.dtype(np.float64): "float64", np.dtype(np.float32): "float32", np.dtype(ml_dtypes.bfloat16): "bfloat16"}
OTHER_MODULES = ("vision_tower.", "mm_projector.")
"""Prefixes of tensors outside the text model; they are passed over."""
NAMED_PROBLEMS = 5

Tree = dict[str, Any]


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder looks like a Hugging Face model: safetensors, or their index, beside a `config.json`."""
    return (folder / "config.json").is_file() and ((folder / INDEX).is_file() or any(folder.glob("*.safetensors")))


def read_checkpoint(folder: Path, config: ModelConfig) -> Tree:
    """Reads the weights tensor by tensor into the canonical tree of NumPy arrays, in the dtype of `config.dtypes.parameters`.

    `config` is `read_config(folder)`, perhaps with other dtypes. Names may carry the prefix `language_model.` or not, `A_log` may be
    zero-padded; vision tensors are passed over.

    Raises:
        UserError: a tensor is missing, unexpected, misshapen or of a type that is not a float, or a file is damaged; the message names
            tensor, file and expected shape.
    """
    check_released(config)
    weights = _Folder(folder)
    _, params, _ = abstract(config)
    canonical = jax.tree.map_with_path(
        lambda path, leaf: weights.leaf(stored(keys_of(path), config), leaf.shape, np.dtype(leaf.dtype)), unstack(params, config)
    )
    weights.check()
    return canonical


def write_checkpoint(folder: Path, config: ModelConfig, canonical: Mapping[str, Any], *, shard_bytes: int = 5 * 2**30) -> None:
    """Writes `config.json` and the weights under the released names, in their own dtype, in files of at most about `shard_bytes`.

    Raises:
        UserError: the folder already holds a model, or the released format has no place for the configuration.
    """
    check_released(config)
    folder.mkdir(parents=True, exist_ok=True)
    present = [*folder.glob("*.safetensors"), *(path for path in (folder / INDEX, folder / "config.json") if path.exists())]
    if present:
        raise UserError(f"{folder} already holds {present[0].name}: choose an empty folder; nothing was written")
    shards: list[list[tuple[Stored, list[Any]]]] = [[]]
    size = total = 0
    dtypes = set()
    for rule, leaves in gathered(canonical, config):
        entry_bytes = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        if shards[-1] and size + entry_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((rule, leaves))
        size, total = size + entry_bytes, total + entry_bytes
        dtypes |= {np.dtype(leaf.dtype) for leaf in leaves}
    write_config(folder / "config.json", config, DTYPE_NAMES[min(dtypes, key=lambda dtype: dtype.itemsize)])

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        contents = {PREFIX + name: tensor for rule, leaves in shard for name, tensor in tensors(rule, leaves)}
        save_file(contents, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(contents, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_file_name(value: object) -> bool:
    """Whether it names something in the folder itself, on any system."""
    return isinstance(value, str) and value not in ("", ".", "..") and not any(mark in value for mark in "/\\:\0")


class _Folder:
    """The tensors of a folder's safetensors files; remembers what was asked for and what was wrong with it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, Any] = {}
        self.file_of = self._locate()
        self.prefix = PREFIX if any(name.startswith(PREFIX) for name in self.file_of) else ""
        self.unread = {name for name in self.file_of if not name.startswith(OTHER_MODULES)}
        self.problems: list[str] = []

    def leaf(self, rule: Stored, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """One of our leaves; zeros in the place of tensors that are missing or wrong, which `check` reports."""
        ours = np.zeros(shape, dtype)
        if "{expert}" in rule.name:
            for expert in range(shape[0]):
                self._read(replace(rule, name=rule.name.format(expert=expert)), ours[expert])
        else:
            self._read(rule, ours)
        return ours

    def check(self) -> None:
        """Raises if any tensor was missing, wrong or left over."""
        self.problems += [f"{name} ({self.file_of[name]}): unexpected, no such tensor in this model" for name in sorted(self.unread)]
        if self.problems:
            problems = list(dict.fromkeys(self.problems))  # two leaves may lie in one tensor
            more = len(problems) - NAMED_PROBLEMS
            lines = [*problems[:NAMED_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])]
            raise UserError(f"{self.folder}: the weights do not fit config.json:\n" + "\n".join(f"  {line}" for line in lines))

    def _read(self, rule: Stored, ours: np.ndarray) -> None:
        """Fills `ours` from the stored tensor, or notes the problem."""
        name = self.prefix + rule.name
        expected = list(rule.shape(ours.shape))
        if name not in self.file_of:
            packed = f"{name.removesuffix('.weight')}.weight_packed"
            why = "stored quantized, which is not supported: convert to BF16 first" if packed in self.file_of else "missing"
            self.problems.append(f"{name} (expected shape {expected}): {why}")
            self.unread.discard(packed)
            return
        self.unread.discard(name)
        file = self.file_of[name]
        try:
            tensor = self._open(file).get_slice(name)
            shape, kind = tensor.get_shape(), tensor.get_dtype()
            fits = len(shape) == 1 and shape[0] >= expected[0] if rule.form == "padded" else shape == expected
            if not fits:
                self.problems.append(f"{name} ({file}): has shape {shape}, expected {expected}")
            elif kind not in FLOATS:
                self.problems.append(f"{name} ({file}): has type {kind}, expected one of {', '.join(FLOATS)}")
            else:
                self._fill(name, rule, tensor[:], ours)
        except SafetensorError as error:
            raise UserError(f"{self.folder / file}: damaged, {name} cannot be read ({error})") from error

    def _fill(self, name: str, rule: Stored, tensor: np.ndarray, ours: np.ndarray) -> None:
        if rule.form == "padded" and np.any(tensor[len(ours) :]):
            self.problems.append(f"{name} ({self.file_of[name]}): has {len(tensor)} entries for {len(ours)} heads and the rest is not zero")
        ours[...] = rule.to_ours(tensor, ours.shape)

    def _open(self, file: str) -> Any:
        if file not in self.files:
            path = self.folder / file
            try:
                self.files[file] = safe_open(path, framework="np")
            except FileNotFoundError as error:
                raise UserError(f"{path}: missing, though {INDEX} names it") from error
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: not a readable safetensors file ({error})") from error
        return self.files[file]

    def _locate(self) -> dict[str, str]:
        """The file of every tensor, from the index if there is one, else from the files themselves."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index}: not an index of safetensors files ({error!r})") from error
            if not isinstance(weight_map, dict):
                raise UserError(f"{index}: not an index of safetensors files (weight_map is not an object)")
            for name, file in weight_map.items():
                if not _is_file_name(file):
                    raise UserError(f"{index}: weight_map.{name} = {json.dumps(file)}: must be the plain name of a file in this folder")
            return weight_map
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.folder}: holds no *.safetensors file")
        file_of: dict[str, str] = {}
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                if name in file_of:
                    raise UserError(f"{self.folder}: {name} is stored twice, in {file_of[name]} and {file}")
                file_of[name] = file
        return file_of
