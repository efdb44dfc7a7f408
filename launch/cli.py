"""The `k3train` command. JAX is imported only by the subcommand that needs it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from k3train.errors import UserError
from launch import evaluate, generate, resume, score, summary, train

OVERRIDES = "Any field can be set after the file: --optimizer.peak-lr 1e-3. A --help after the file lists the fields."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 2 something that the user can mend, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wants_traceback = "--traceback" in arguments
    try:
        options = _parser().parse_args([argument for argument in arguments if argument != "--traceback"])
        options.run(options)
        sys.stdout.flush()
        return 0
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as in `k3train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if wants_traceback:
            traceback.print_exc()
        print(f"k3train: {_explained(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # help, version, and the messages that argparse and tyro print themselves
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("k3train: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # JAX is not imported here, so its error is known by what it says
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        if wants_traceback:
            traceback.print_exc()
        print(
            f"k3train: out of memory ({str(error).splitlines()[0][:200]}). Make the model, data.batch_size or data.sequence_length"
            " smaller, raise optimizer.microbatches, or set model.remat to layer; `k3train summary` counts parameters."
            " With `generate`, lower --max-new-tokens or --num-samples.",
            file=sys.stderr,
        )
        return 2


def command() -> NoReturn:
    """The console script: `main`, and an end that waits for nobody.

    After a failed save, Orbax's threads would keep a process alive that has nothing left to do.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def _explained(error: Exception) -> str:
    """The message; for an error of the file system, with what to do."""
    if isinstance(error, OSError) and error.strerror:
        files = " and ".join(str(name) for name in (error.filename, error.filename2) if name)
        return f"{files or 'a file'}: {error.strerror}. Mend the path, its permissions or the disk's room, and try again."
    return str(error)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        hint = "; an experiment's fields come after its file" if message.startswith("unrecognized") else ""
        raise UserError(f"{message} (see {self.prog} --help{hint})")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="k3train", description="Train, resume, score and sample Kimi-K3-class language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"k3train {_version()}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from; works with every command")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, usage: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, usage=f"k3train {name} {usage}", help=text, description=text, epilog=epilog, allow_abbrev=False)

    fields = "[--FIELD VALUE ...]"
    train.add_arguments(command("train", f"EXPERIMENT.py {fields}", "start a run from an experiment file", OVERRIDES))
    resume.add_arguments(command("resume", resume.USAGE, "go on with a run from a checkpoint"))
    summary.add_arguments(
        command("summary", f"EXPERIMENT.py [--json] {fields}", "count parameters and FLOPs, without making an array", OVERRIDES)
    )
    options = "--tokens TOKENS.npy --out LOGITS.npy [--batch-size N] [--overwrite]"
    score.add_arguments(command("score", f"MODEL {options}", "write a model's logits on given tokens"))
    generate.add_arguments(command("generate", generate.USAGE, "go on with a text"))
    evaluate.add_arguments(command("evaluate", evaluate.USAGE, "score a checkpoint on held-out text"))
    return parser


def _version() -> str:
    try:
        return metadata.version("k3train")
    except metadata.PackageNotFoundError:  # run from a source folder that is not installed
        return "(not installed)"


if __name__ == "__main__":
    command()
