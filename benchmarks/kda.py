"""Speed of Kimi Delta Attention on one GPU, beside a peer's script in the same run.

    python benchmarks/kda.py --peer path/to/fla_kda.py --output docs/benchmarks/kda_h200.json

Every row draws random bf16 inputs on the device, warms up, and takes the median of seven windows of many dispatches each,
waiting only at a window's end: calls of 0.2 ms and more hide the dispatch. The peer's script runs last, in a process of its
own; each line it prints that reads as a dict with the keys B, T, H, D, fwd_ms, fwdbwd_ms, peak_extra_MB becomes a row.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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


def row(implementation: str, shape: tuple[int, ...], backward: bool) -> dict:
    """One row of the table."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kda.chunked import kda_chunked

    if implementation == "hopper":
        from pallas_kernels.kda.hopper import kda_hopper as form
    else:
        form = kda_chunked
    batch, tokens, heads, width, documents = shape
    keys = jax.random.split(jax.random.key(0), 8)
    q, k, v, gate, d_o = (jax.random.normal(key, (batch, tokens, heads, width), jnp.bfloat16) for key in keys[:5])
    beta = jax.random.normal(keys[5], (batch, tokens, heads), jnp.bfloat16)
    a_log = jnp.log(jax.random.uniform(keys[6], (heads,), minval=1.0, maxval=16.0))
    dt_bias = 0.1 * jax.random.normal(keys[7], (heads, width))
    inputs = (q, k, v, gate, beta, a_log, dt_bias)
    ids = None if documents == 1 else jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) * documents // tokens, (batch, tokens))

    def call(*inputs):
        return form(*inputs, lower_bound=LOWER_BOUND, segment_ids_BT=ids)[0]

    def both(d_o, *inputs):
        o, pull_back = jax.vjp(call, *inputs)
        return o, pull_back(d_o)

    calls = max(1, 20 * 8192 // max(tokens, 8192))
    found = dict(zip(("B", "T", "H", "K", "documents"), shape, strict=True)) | {"implementation": implementation}
    forward = jax.jit(call).lower(*inputs).compile()
    found["forward_ms"], found["forward_spread_ms"] = (round(x, 4) for x in milliseconds(forward, inputs, calls))
    found["forward_extra_bytes"] = forward.memory_analysis().temp_size_in_bytes
    found["forward_backward_ms"] = found["extra_bytes"] = None
    if backward:
        program = jax.jit(both).lower(d_o, *inputs).compile()
        found["forward_backward_ms"] = round(milliseconds(program, (d_o, *inputs), max(1, calls // 4))[0], 4)
        found["extra_bytes"] = program.memory_analysis().temp_size_in_bytes
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
    rows = []
    for shape in options.shapes:
        for implementation in options.implementations:
            try:
                rows.append(row(implementation, tuple(map(int, shape.split(","))), options.backward))
            except Exception as failure:  # one shape that does not fit must not cost the others
                print(f"{implementation} {shape}: {failure!r:.2000}", file=sys.stderr)
    if options.peer:
        rows += peer_rows(options.peer, 4 * options.timeout)
    for found in rows:
        place = " ".join(f"{name}={found[name]}" for name in ("B", "T", "H", "K", "documents"))
        print(
            f"{found['implementation']:24s} {place:40s} forward {found['forward_ms']} ms, with backward {found['forward_backward_ms']} ms"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
