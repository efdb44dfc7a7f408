"""Speed of Kimi Delta Attention on one GPU, beside a peer's script in the same run.

    python benchmarks/kda.py --peer path/to/fla_kda.py --output docs/benchmarks/kda_h200.json

Every row has a process of its own: all compile at once, but one at a time has the GPU. It draws random bf16 inputs on the device, checks
that two runs give the same finite bits, warms up, and takes the median of seven windows of many dispatches each, waiting only at
a window's end: calls of 0.2 ms and more hide the dispatch. The peer's script runs last; each line it prints that reads as a dict with
the keys B, T, H, D, fwd_ms, fwdbwd_ms, peak_extra_MB becomes a row. The peer's extra bytes hold its gradients, ours do not.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# batch, tokens, heads, channels, packed documents
SHAPES = ("1,8192,96,128,1", "1,8192,96,128,8", "1,8192,16,128,1", "1,65536,96,128,1")
LOWER_BOUND = -5.0


def milliseconds(function: Callable, args: tuple, calls: int) -> tuple[float, float]:
    """Median and spread (largest minus smallest) of one call's time over seven windows."""
    import jax

    jax.block_until_ready(function(*args))
    windows = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(calls):
            results = function(*args)
        jax.block_until_ready(results)
        windows.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(windows), max(windows) - min(windows)


@contextmanager
def gpu_alone() -> Iterator[None]:
    """Only one process of this script at a time is inside."""
    with open(Path(tempfile.gettempdir(), "k3train-benchmark-kda.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def row(implementation: str, shape: tuple[int, ...], backward: bool) -> dict:
    """One row of the table."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other rows' processes wait beside this one
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kda.chunked import kda_chunked

    if implementation == "hopper":
        from pallas_kernels.kda.hopper import kda_hopper as form
    else:
        form = kda_chunked
    batch, tokens, heads, width, documents = shape

    def draw() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0), 8)
        q, k, v, gate, d_o = (jax.random.normal(key, (batch, tokens, heads, width), jnp.bfloat16) for key in keys[:5])
        beta = jax.random.normal(keys[5], (batch, tokens, heads), jnp.bfloat16)
        a_log = jnp.log(jax.random.uniform(keys[6], (heads,), minval=1.0, maxval=16.0))
        return d_o, q, k, v, gate, beta, a_log, 0.1 * jax.random.normal(keys[7], (heads, width))

    ids = None if documents == 1 else jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) * documents // tokens, (batch, tokens))

    def call(*inputs):
        return form(*inputs, lower_bound=LOWER_BOUND, segment_ids_BT=ids)[0]

    def both(d_o, *inputs):
        o, pull_back = jax.vjp(call, *inputs)
        return o, pull_back(d_o)

    @jax.jit
    def agree(first, second):
        same = [jnp.all(a == b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)]
        finite = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(first)]
        return jnp.stack(same).all(), jnp.stack(finite).all()

    shapes = jax.eval_shape(draw)
    forward = jax.jit(call).lower(*shapes[1:]).compile()
    program = jax.jit(both).lower(*shapes).compile() if backward else None
    calls = max(1, 20 * 8192 // max(tokens, 8192))
    found = dict(zip(("B", "T", "H", "K", "documents"), shape, strict=True)) | {"implementation": implementation}
    with gpu_alone():
        inputs = jax.jit(draw)()
        found["forward_ms"], found["forward_spread_ms"] = (round(x, 4) for x in milliseconds(forward, inputs[1:], calls))
        found["forward_extra_bytes"] = forward.memory_analysis().temp_size_in_bytes
        found["forward_backward_ms"] = found["extra_bytes"] = None
        if program is not None:
            found["forward_backward_ms"], found["forward_backward_spread_ms"] = (
                round(x, 4) for x in milliseconds(program, inputs, max(1, calls // 4))
            )
            found["extra_bytes"] = program.memory_analysis().temp_size_in_bytes
        checked, arguments = (forward, inputs[1:]) if program is None else (program, inputs)
        found["same_bits"], found["finite"] = (bool(x) for x in agree(checked(*arguments), checked(*arguments)))
    return found


def peer_rows(script: Path, seconds: float) -> list[dict]:
    """Runs a peer's script and reads the rows it prints."""
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=seconds, check=False)
    rows = []
    for line in result.stdout.splitlines():
        try:
            printed = ast.literal_eval(line)
        except (SyntaxError, ValueError):
            continue
        rows.append(
            {
                "implementation": "flash-linear-attention",
                **{"B": printed["B"], "T": printed["T"], "H": printed["H"], "K": printed["D"], "documents": 1},
                "forward_ms": printed["fwd_ms"],
                "forward_backward_ms": printed["fwdbwd_ms"],
                "extra_bytes": printed["peak_extra_MB"] * 2**20,
            }
        )
    if not rows:
        print(f"{script}: no rows.\n{result.stderr[-2000:]}", file=sys.stderr)
    return rows


def environment() -> dict[str, str]:
    """Versions and device of the run."""
    found = {"command": "python " + " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "triton", "flash-linear-attention"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["device"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        found["device"] = "no NVIDIA GPU"
    return found


def report(rows: list[dict], output: Path | None) -> None:
    """Prints the rows so far, and writes them."""
    for found in rows:
        place = " ".join(f"{name}={found[name]}" for name in ("B", "T", "H", "K", "documents"))
        print(
            f"{found['implementation']:24s} {place:40s} forward {found['forward_ms']} ms, with backward {found['forward_backward_ms']} ms",
            flush=True,
        )
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Measures every shape and implementation, prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="batch,tokens,heads,channels,documents")
    parser.add_argument("--implementations", nargs="+", default=["hopper"], choices=["hopper", "chunked"])
    parser.add_argument("--backward", action="store_true", help="time the gradient too")
    parser.add_argument("--peer", type=Path, help="script of a peer, run last")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a fourth of the peer's script")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    wanted = [(implementation, shape) for shape in options.shapes for implementation in options.implementations]
    rows = []
    with ProcessPoolExecutor(len(wanted), mp_context=get_context("spawn")) as processes:
        waiting = [processes.submit(row, name, tuple(map(int, shape.split(","))), options.backward) for name, shape in wanted]
        for (name, shape), result in zip(wanted, waiting, strict=True):
            try:
                rows.append(result.result())
            except Exception as failure:  # one shape that does not fit must not cost the others
                print(f"{name} {shape}: {failure!r:.2000}", file=sys.stderr)
    report(rows, options.output)
    if options.peer:
        with gpu_alone():
            rows += peer_rows(options.peer, 4 * options.timeout)
        report(rows, options.output)


if __name__ == "__main__":
    main()
