"""`k3train summary`: parameters and floating-point work of an experiment's model, from abstract shapes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from k3train.config import Experiment
from launch import experiments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train summary`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    experiments.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the summary as a table or as JSON."""
    overrides = [argument for argument in options.overrides if argument != "--json"]
    as_json = options.json or len(overrides) < len(options.overrides)
    result = summarize(experiments.resolve(options.experiment, overrides, "k3train summary"))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_table(result)


def summarize(experiment: Experiment) -> dict[str, Any]:
    """The figures of `k3train.models.flops` for the experiment's model at its sequence length; makes no array."""
    from k3train.models import flops, stacks
    from k3train.models.parameters import abstract

    _, params, _ = abstract(experiment.model)
    sequence_length = experiment.data.sequence_length
    by_part = flops.parts(stacks.unstack(params, experiment.model), experiment.model, sequence_length)
    whole = flops.whole(by_part)
    return {
        "name": experiment.name,
        "sequence_length": sequence_length,
        "parameters_total": whole.total,
        "parameters_active": whole.active,
        "forward_flops_per_token": whole.forward_flops,
        "training_flops_per_token": flops.training_flops(whole.forward_flops),
        "by_part": {
            name: {"parameters_total": part.total, "parameters_active": part.active, "forward_flops_per_token": part.forward_flops}
            for name, part in by_part.items()
        },
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['name']}: rows of {result['sequence_length']} tokens", caption_justify="left")
    table.caption = (
        "active: on one token's path, with the head, without the embedding table\n"
        "FLOPs, per token: matmuls, convolutions, causal half of attention, KDA in chunks, residual mixing; a multiply-add is two\n"
        f"training: 3 x forward = {result['training_flops_per_token']:.4e} FLOPs per token, recomputation not counted"
    )
    table.add_column("part", no_wrap=True)
    for heading in ("parameters", "active", "forward FLOPs"):
        table.add_column(heading, justify="right")
    columns = ("parameters_total", "parameters_active", "forward_flops_per_token")
    for name, part in result["by_part"].items():
        table.add_row(name.replace("_", " "), *(f"{part[column]:,}" for column in columns))
    table.add_section()
    table.add_row("all", *(f"{result[column]:,}" for column in columns), style="bold")
    Console().print(table)
