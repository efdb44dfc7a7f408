"""What a finished run leaves behind: `result.json`, the loss curve as a picture, and a table for the person."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3train.config_io import write_json
from k3train.errors import UserError
from k3train.train.progress import duration

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a whole run."""

    name: str
    heldout_bits_per_byte: float | None
    """None: not finite."""
    heldout_loss: float | None
    """Nats per held-out token; None: not finite."""
    baselines: dict[str, float]
    """Bits per byte of counting models on all of the held-out text; empty where tokens are not bytes or the text is too long to count."""
    seconds: float
    """Wall time, set-up and compilation included, over all resumes."""
    tokens: int
    """Targets trained on."""
    steps: int
    parameters: int
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """Writes the JSON file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads what `save` wrote.

        Raises:
          UserError: the file is damaged.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not the result of a run. Delete it: `k3train resume` then writes it anew.") from error


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide the numbers."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def print_table(result: Result, console: Console) -> None:
    """The model beside the counting models, best last."""
    table = Table(title=f"{result.name}: held-out bits per byte", title_justify="left")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    rows: list[tuple[str, float, str]] = [(f"counts of {name.replace('_', ' ')}", bits, "") for name, bits in result.baselines.items()]
    own = math.inf if result.heldout_bits_per_byte is None else result.heldout_bits_per_byte
    rows.append((f"this run ({result.parameters:,} parameters)", own, "bold"))
    for name, bits, style in sorted(rows, key=lambda row: -row[1]):
        table.add_row(name, f"{bits:.3f}" if math.isfinite(bits) else "not finite", style=style)
    console.print(table)
    console.print(f"{result.steps:,} steps, {result.tokens:,} tokens, {duration(result.seconds)} of wall time", highlight=False)


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], path: Path) -> None:
    """Training and held-out loss over the steps in bits per byte, with the baselines as dashed lines; a PNG."""
    # Matplotlib takes about a second to import, and only a run that ends needs it. Without pyplot it keeps no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(line["step"], line["loss"] / math.log(2.0)) for line in lines if line.get("loss") is not None]
    heldout = [(line["step"], line["heldout_bits_per_byte"]) for line in lines if line.get("heldout_bits_per_byte") is not None]
    if train:
        steps, bits = zip(*train, strict=True)
        axes.plot(steps, bits, color="#9ecae1", linewidth=0.8)
        axes.plot(steps, smooth(bits), color="#08519c", linewidth=1.8, label="training text (smoothed)")
    if heldout:
        axes.plot(*zip(*heldout, strict=True), "o-", color="#d94801", markersize=4, linewidth=1.2, label="held-out text")
    for (name, value), shade in zip(baselines.items(), ("#bbbbbb", "#888888", "#555555"), strict=False):
        axes.axhline(value, color=shade, linestyle="--", linewidth=1.0, label=f"counts of {name.replace('_', ' ')}: {value:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window around each value, a tenth of the curve wide; narrower at the ends, so that it neither lags nor leads."""
    reach = max(len(values) // 20, 1)
    windows = ((i, min(reach, i, len(values) - 1 - i)) for i in range(len(values)))
    return [sum(values[i - near : i + near + 1]) / (2 * near + 1) for i, near in windows]
