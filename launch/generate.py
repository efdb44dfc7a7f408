"""`k3train generate`: a model goes on with a text."""

from __future__ import annotations

import argparse
import codecs
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.errors import UserError
from launch.models import load_model, not_finite

if TYPE_CHECKING:
    import numpy as np

    from k3train.config import ModelConfig

USAGE = "RUN [--prompt TEXT | --prompt-file FILE | --tokens IDS] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `k3train generate`."""
    parser.add_argument("model", type=Path, metavar="RUN", help="a run folder; with --tokens also a Hugging Face folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to go on with (default: none, a new document begins)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with that text")
    prompt.add_argument("--tokens", metavar="IDS", help="token ids to go on with, as in 5,17,3; the new ids are printed instead of text")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens at most (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the best token each time (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K best tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the fewest best tokens whose probabilities sum to P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="continuations of the same prompt (default: 1)")
    parser.add_argument("--step", type=int, metavar="S", help="a saved step (default: the newest)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Checks the options, loads the model, and prints the prompt and what follows as it comes; several samples one after another."""
    _check(options)
    text = _prompt_bytes(options)
    from k3train.interop import hugging_face
    from k3train.train import compile_cache

    if options.tokens is None and hugging_face.describes_model(options.model):
        raise UserError(f"{options.model}: a Hugging Face folder; its tokenizer is not read, so give --tokens IDS instead of text")

    compile_cache.enable()
    config, params = load_model(options.model, step=options.step)
    if options.tokens is None:
        _print_text(options, config, params, text)
    else:
        _print_tokens(options, config, params)


def _check(options: argparse.Namespace) -> None:
    """Raises `UserError` on a number that means nothing."""
    rules = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "at least 1"),
        ("--num-samples", options.num_samples, options.num_samples >= 1, "at least 1"),
        (
            "--temperature",
            options.temperature,
            options.temperature == 0 or (options.temperature >= 1e-3 and math.isfinite(options.temperature)),
            "0, or at least 0.001 and finite",
        ),
        ("--top-k", options.top_k, options.top_k is None or options.top_k >= 1, "at least 1"),
        ("--top-p", options.top_p, options.top_p is None or 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("--seed", options.seed, 0 <= options.seed < 2**32, "between 0 and 2^32 - 1"),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise UserError(f"{name} {value}: must be {rule}")


def _prompt_bytes(options: argparse.Namespace) -> bytes:
    """The prompt's text; bytes of a file that are not UTF-8 stay as they are."""
    if options.prompt_file is None:
        return (options.prompt or "").encode("utf-8", "surrogateescape")
    if options.prompt_file.is_dir():
        raise UserError(f"{options.prompt_file}: is a folder; --prompt-file takes a file with text")
    text = options.prompt_file.read_bytes()
    if b"\0" in text:
        raise UserError(f"{options.prompt_file}: binary (holds a zero byte); --prompt-file takes a file with text")
    return text


def _pieces(
    options: argparse.Namespace, config: ModelConfig, params: Any, prompt: Any, stop_id: int | None, num_tokens: int
) -> Iterator[np.ndarray]:
    """The new tokens [samples, N] as they come."""
    from k3train.inference.generate import NotFiniteError, stream
    from k3train.inference.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    try:
        yield from stream(
            config, params, [prompt] * options.num_samples, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed,
            stop_id=stop_id, num_tokens=num_tokens,
        )  # fmt: skip
    except NotFiniteError:
        raise not_finite(options.model, config, params, "the logits are") from None


def _print_text(options: argparse.Namespace, config: ModelConfig, params: Any, text: bytes) -> None:
    import numpy as np

    from k3train.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    prompt = np.concatenate([[tokenizer.boundary_id], tokenizer.encode(text)])
    pieces = _pieces(options, config, params, prompt, tokenizer.boundary_id, tokenizer.vocab_size)
    if options.num_samples == 1:
        readable = codecs.getincrementaldecoder("utf-8")("replace")  # a character may lie across two pieces
        first = True
        for piece_BN in pieces:
            new = tokenizer.decode_bytes(piece_BN[0][piece_BN[0] >= 0])
            print(readable.decode(text + new if first else new), end="", flush=True)
            first = False
        print(readable.decode(b"", final=True))
        return
    for number, row_N in enumerate(np.concatenate(list(pieces), axis=1), 1):
        print(f"--- sample {number} of {options.num_samples} ---")
        print((text + tokenizer.decode_bytes(row_N[row_N >= 0])).decode("utf-8", "replace"))


def _print_tokens(options: argparse.Namespace, config: ModelConfig, params: Any) -> None:
    """One line of new ids per sample."""
    import numpy as np

    try:
        prompt = [int(part) for part in options.tokens.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--tokens {options.tokens}: must be whole numbers, as in 5,17,3") from None
    if not prompt or min(prompt) < 0 or max(prompt) >= config.vocab_size:
        raise UserError(f"--tokens {options.tokens}: must be at least one id, each from 0 to {config.vocab_size - 1}")
    pieces = _pieces(options, config, params, prompt, None, config.vocab_size)
    for row_N in np.concatenate(list(pieces), axis=1):
        print(",".join(map(str, row_N.tolist())))
