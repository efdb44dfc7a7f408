"""`k3train score`: a model's logits on given tokens, in float32, for comparison with any other implementation."""

from __future__ import annotations

import argparse
import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.errors import UserError
from launch.models import load_model, not_finite

if TYPE_CHECKING:
    import numpy as np

    from k3train.config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train score`."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run folder or a Hugging Face folder (config.json, *.safetensors)",
    )
    parser.add_argument("--step", type=int, metavar="S", help="a run's saved step (default: the newest)")
    parser.add_argument("--tokens", type=Path, required=True, metavar="TOKENS.npy", help="integer token ids [B, T], each row one document")
    parser.add_argument("--out", type=Path, required=True, metavar="LOGITS.npy", help="float32 logits [B, T, V] are written here")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows computed at a time (default: 8)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Checks the inputs, loads the model, writes the logits batch by batch, and moves the whole file into place."""
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size}: must be at least 1")
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder: --out must name the .npy file to write")
    if options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out} exists: choose another --out, or give --overwrite")
    if not options.out.parent.is_dir():
        raise UserError(f"{options.out}: its folder {options.out.parent} does not exist")
    tokens_BT = read_tokens(options.tokens)
    from k3train.train import compile_cache

    compile_cache.enable()
    config, params = load_model(options.model, step=options.step, float32=True)
    _check_range(tokens_BT, config.vocab_size, options.tokens)
    if not write_logits(config, params, tokens_BT, options.out, options.batch_size):
        raise not_finite(options.model, config, params, "the logits are")
    print(f"{options.out}: float32 logits {[*tokens_BT.shape, config.vocab_size]}")


def read_tokens(path: Path) -> np.ndarray:
    """Token ids [B, T] from an .npy file of any integer type; raises `UserError` if it holds anything else."""
    import numpy as np

    try:
        tokens_BT = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an .npy array of numbers, or damaged; write the token ids with numpy.save") from error
    if not isinstance(tokens_BT, np.ndarray):
        raise UserError(f"{path}: holds several arrays; give an .npy file with the token ids alone")
    if tokens_BT.ndim != 2 or not np.issubdtype(tokens_BT.dtype, np.integer) or tokens_BT.size == 0:
        raise UserError(f"{path}: must hold integer token ids [B, T], at least one; found {tokens_BT.dtype} {list(tokens_BT.shape)}")
    return tokens_BT


def _check_range(tokens_BT: np.ndarray, vocab_size: int, path: Path) -> None:
    lowest, highest = int(tokens_BT.min()), int(tokens_BT.max())
    if lowest < 0 or highest >= vocab_size:
        raise UserError(f"{path}: token ids run from {lowest} to {highest}, but the model's vocabulary is 0 to {vocab_size - 1}")


def write_logits(config: ModelConfig, params: Any, tokens_BT: np.ndarray, out: Path, batch_size: int) -> bool:
    """Runs the model on `batch_size` rows at a time, each row one document, and writes float32 logits [B, T, V] to `out`.

    Matmuls run at the highest precision, so that accelerators give float32 results too. The file appears at `out` when it is whole.
    Returns False, and writes nothing, as soon as a logit is not finite.
    """
    import jax
    import numpy as np
    from flax import nnx

    from k3train.models.layout import LocalLayout
    from k3train.models.parameters import abstract

    graphdef, _, _ = abstract(config)
    B, T = tokens_BT.shape
    rows = min(batch_size, B)

    @jax.jit
    def logits_of(params: Any, tokens_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, params)
        return decoder(tokens_BT, jax.numpy.zeros_like(tokens_BT), layout=LocalLayout()).logits_BTV

    descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=".k3train-score-", suffix=".partial")
    os.close(descriptor)
    partial = Path(name)
    try:
        partial.chmod(0o666 & ~_umask())  # mkstemp's file is the owner's alone
        logits_BTV = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=(B, T, config.vocab_size))
        with jax.default_matmul_precision("highest"):
            for start in range(0, B, rows):
                batch_BT = tokens_BT[start : start + rows].astype(np.int32)
                padded_BT = np.pad(batch_BT, ((0, rows - len(batch_BT)), (0, 0)))  # one compilation for all batches
                batch_BTV = np.asarray(logits_of(params, padded_BT))[: len(batch_BT)]
                if not np.all(np.isfinite(batch_BTV)):
                    return False
                logits_BTV[start : start + rows] = batch_BTV
        logits_BTV.flush()
        os.replace(partial, out)
        return True
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask
