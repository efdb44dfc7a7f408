"""The house rules, read from the sources: who may import whom, who names mesh axes, and how long a file may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
WHEEL = ("k3train", "pallas_kernels", "launch")
MAX_LINES = 450
MESH_AXES = {"pipeline", "replica", "fsdp", "expert", "sequence", "tensor"}

LEAVES = {"k3train.config", "k3train.config_io", "k3train.errors"}
BELOW_TRAIN = LEAVES | {f"k3train.{room}" for room in ("models", "sharding", "optim", "data", "interop", "inference")}
# What the modules of a room may import of this house, beside their own room. A module belongs to the longest name that fits;
# a new room needs a line here.
MAY_IMPORT = {
    "launch": {"k3train"},
    "k3train": LEAVES,
    "k3train.plan": BELOW_TRAIN | {"k3train.train"},
    "k3train.scaling": BELOW_TRAIN | {"k3train.train"},
    "k3train.train": BELOW_TRAIN,
    "k3train.sharding": LEAVES | {"k3train.models.layout", "pallas_kernels"},
    "k3train.models": LEAVES,
    "k3train.models.layout": LEAVES | {"k3train.models", "pallas_kernels"},
    "k3train.inference": LEAVES | {"k3train.models"},
    "k3train.interop": LEAVES | {"k3train.models"},
    "k3train.optim": LEAVES,
    "k3train.data": LEAVES,
    "k3train.config": {"k3train.errors"},
    "k3train.config_io": {"k3train.config", "k3train.errors"},
    "k3train.errors": set(),
    "pallas_kernels": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for package in WHEEL for path in sorted((REPOSITORY / package).rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8"), str(path)) for module, path in PATHS.items()}


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, inside functions and TYPE_CHECKING too. A part taken from a package counts as such."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                part = f"{source}.{alias.name}"
                yield node.lineno, part if part in PATHS or part in MAY_IMPORT else source


def broken_import_rules(module: str, tree: ast.Module, *, is_package: bool) -> list[str]:
    room = max((room for room in MAY_IMPORT if within(module, room)), key=len)
    allowed = MAY_IMPORT[room] | ({room} if room != "k3train" else set())
    return [
        f"{module}:{line}: {room} may not import {name}"
        for line, name in imports(module, tree, is_package=is_package)
        if name.split(".")[0] in WHEEL and not any(within(name, target) for target in allowed)
    ]


def broken_mesh_rules(module: str, tree: ast.Module) -> list[str]:
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MESH_AXES)
        or (isinstance(node, ast.Attribute) and node.attr == "shard_map")
        or (isinstance(node, ast.alias) and node.name.split(".")[-1] == "shard_map")
    ]


def test_every_import_is_allowed():
    packages = {module for module, path in PATHS.items() if path.name == "__init__.py"}
    faults = [fault for module, tree in TREES.items() for fault in broken_import_rules(module, tree, is_package=module in packages)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("module", sorted(LEAVES & set(PATHS)))
def test_config_and_errors_import_the_standard_library_only(module):
    foreign = [name for _, name in imports(module, TREES[module], is_package=False) if name.split(".")[0] not in sys.stdlib_module_names]
    assert set(foreign) <= LEAVES


def test_only_sharding_names_mesh_axes_and_maps_over_them():
    others = {module: tree for module, tree in TREES.items() if not within(module, "k3train.sharding")}
    faults = [fault for module, tree in others.items() for fault in broken_mesh_rules(module, tree)]
    assert not faults, "mesh axes and shard_map belong in k3train/sharding:\n" + "\n".join(faults)


def test_files_stay_short():
    paths = [path for folder in (*WHEEL, "experiments", "benchmarks", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    lengths = {path.relative_to(REPOSITORY): len(path.read_bytes().splitlines()) for path in paths}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_LINES]
    assert not long, f"a file of more than {MAX_LINES} lines probably holds two subjects:\n" + "\n".join(long)


@pytest.mark.parametrize(
    "module, code",
    [
        ("k3train.models.kda", "import k3train.sharding"),
        ("k3train.models.kda", "from k3train import sharding"),
        ("k3train.models.kda", "from ..data import loader"),
        ("k3train.models.kda", "def f():\n  from pallas_kernels.kda import kda"),
        ("k3train.sharding.layout", "from k3train.models.decoder import Decoder"),
        ("k3train.sharding.layout", "from k3train.models import norms"),
        ("k3train.optim.chain", "import k3train.models.parameters as parameters"),
        ("k3train.errors", "import k3train.config"),
        ("k3train.newcomer", "import k3train.train.loop"),
        ("pallas_kernels.kda", "from k3train.errors import UserError"),
    ],
)
def test_wrong_imports_are_seen(module, code):
    assert broken_import_rules(module, ast.parse(code), is_package=False)


@pytest.mark.parametrize("code", ["spec = P(None, 'fsdp')", "jax.shard_map(f)", "from jax.experimental.shard_map import shard_map"])
def test_wrong_mesh_code_is_seen(code):
    assert broken_mesh_rules("k3train.train.step", ast.parse(code))
