"""Speed of the grouped matmul kernels on one Hopper GPU, beside XLA's dense matmul and torch's grouped matmul.

    python benchmarks/grouped_matmul.py --output docs/benchmarks/grouped_matmul_h200.json

Every measurement is a process of its own, so that compilation runs in parallel; measuring begins when all have compiled, since
busy processors disturb it, and a lock keeps the GPU to one at a time. A measurement rests, warms up, and takes the median of
three windows of many calls, each one program without host work in between; what prepares the tile tables counts. Rates are
2 M K N per second, whatever the kernel pads.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# (groups E, rows M, K, N): (calls in a window, size distributions)
SHAPES = {
    (112, 65536, 3584, 3072): (20, ("even", "dirichlet5", "one")),
    (64, 65536, 512, 384): (400, ("even", "dirichlet5", "one")),
    (128, 262144, 1024, 768): (50, ("even", "dirichlet5", "one")),
    (896, 65536, 1024, 768): (100, ("even", "tiny")),
}
QUANTITIES = ("forward", "grad_rows", "grad_weights", "grad_weights_fp32", "grad_weights_accumulated")
LOCK = Path(tempfile.gettempdir()) / "k3train_benchmark.lock"
READY = "READY"  # what a process prints when it only waits for the GPU


def group_sizes(groups: int, rows: int, kind: str) -> np.ndarray:
    """Sizes that sum to `rows`: even, dirichlet5 (concentration 5), one (a single group), tiny (4 rows each but for 16 groups)."""
    if kind == "one":
        sizes = np.zeros(groups, np.int64)
    elif kind == "dirichlet5":
        sizes = np.floor(np.random.default_rng(0).dirichlet(np.full(groups, 5.0)) * rows).astype(np.int64)
    elif kind == "tiny":
        sizes = np.full(groups, 4)
        sizes[:: groups // 16] = (rows - 4 * (groups - 16)) // 16
    else:
        sizes = rows // groups + (np.arange(groups) < rows % groups)
    sizes[groups // 2] += rows - sizes.sum()
    return sizes.astype(np.int32)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """With the GPU for oneself among the processes of a benchmark."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def windows(run: Callable[[], None], calls: int) -> list[float]:
    """Seconds of one call, sorted, from three windows of `calls` calls each, after a rest and a warm-up."""
    print(READY, flush=True)
    with in_turn():
        time.sleep(0.4)
        run()
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            seconds.append((time.perf_counter() - begin) / calls)
    return sorted(seconds)


def repeated(function: Callable, calls: int, carry_result: bool) -> Callable:
    """A jitted loop of `calls` calls; barriers, or the result as the next last argument, keep XLA from sharing them."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def chained(*args):
        def body(_, carry):
            args, _ = lax.optimization_barrier(carry)
            return args, function(*args)

        nothing = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(function, *args))
        return lax.fori_loop(0, calls, body, (args, nothing))[1]

    def carried(*args):
        return lax.fori_loop(0, calls, lambda _, last: function(*args[:-1], last), args[-1])

    return jax.jit(carried, donate_argnums=3) if carry_result else jax.jit(chained)


def measure_hopper(shape: tuple[int, ...], quantity: str, calls: int, kinds: tuple[str, ...]) -> dict:
    """Our kernels: seconds per size distribution, and the temporary bytes of one call."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul.hopper_rows import rows_matmul
    from pallas_kernels.grouped_matmul.hopper_weights import weights_gradient

    groups, rows, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, k), jnp.bfloat16)
    dy = jax.random.normal(keys[1], (rows, n), jnp.bfloat16)
    w = jax.random.normal(keys[2], (groups, k, n), jnp.bfloat16) if quantity in ("forward", "grad_rows") else None
    sizes = {kind: jnp.asarray(group_sizes(groups, rows, kind)) for kind in kinds}
    accumulates = quantity == "grad_weights_accumulated"
    function, args = {
        "forward": (rows_matmul, (x, w)),
        "grad_rows": (functools.partial(rows_matmul, transpose_w=True), (dy, w)),
        "grad_weights": (weights_gradient, (x, dy)),
        "grad_weights_fp32": (functools.partial(weights_gradient, out_dtype=jnp.float32), (x, dy)),
        "grad_weights_accumulated": (lambda x, dy, sizes, total: weights_gradient(x, dy, sizes, accumulate_into=total), (x, dy)),
    }[quantity]
    total = (jnp.zeros((groups, k, n), jnp.float32),) if accumulates else ()
    program = repeated(function, calls, accumulates).lower(*args, sizes[kinds[0]], *total).compile()
    result: dict = {}
    for kind in kinds:

        def run(kind=kind):
            nonlocal total
            out = jax.block_until_ready(program(*args, sizes[kind], *total))
            total = (out,) if accumulates else ()

        result[kind] = windows(run, calls)
    result["temp_bytes"] = int(program.memory_analysis().temp_size_in_bytes)
    return result


def measure_dense(shape: tuple[int, ...], calls: int) -> dict[str, list[float]]:
    """XLA's batched matmul of the same work, rows spread evenly."""
    import jax
    import jax.numpy as jnp

    groups, rows, k, n = shape
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (groups, -(-rows // groups), k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (groups, k, n), jnp.bfloat16)
    program = repeated(lambda x, w: jnp.einsum("emk,ekn->emn", x, w), calls, False).lower(x, w).compile()
    return {"even": windows(lambda: jax.block_until_ready(program(x, w)), calls)}


def measure_torch(shape: tuple[int, ...], quantity: str, calls: int, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """torch's grouped matmul, weights in the layout that is fast for it."""
    import torch

    groups, rows, k, n = shape
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, dy = make(rows, k), make(rows, n)
    w = make(groups, n, k) if quantity == "forward" else make(groups, k, n)
    result = {}
    for kind in kinds:
        ends = torch.tensor(np.cumsum(group_sizes(groups, rows, kind)), dtype=torch.int32, device="cuda")
        left, right = {
            "forward": (x, w.transpose(-2, -1)),
            "grad_rows": (dy, w.transpose(-2, -1)),
            "grad_weights": (x.transpose(0, 1), dy),
        }[quantity]

        def run(left=left, right=right, ends=ends):
            for _ in range(calls):
                torch._grouped_mm(left, right, offs=ends)
            torch.cuda.synchronize()

        result[kind] = windows(run, calls)
    return result


def jobs() -> list[tuple[str, tuple[int, ...], str]]:
    """(implementation, shape, quantity) of every measurement."""
    first, second, third, _ = SHAPES
    listed = [("hopper", shape, quantity) for shape in SHAPES for quantity in QUANTITIES[:3]]
    listed += [("hopper", first, quantity) for quantity in QUANTITIES[3:]]
    listed += [("torch", shape, quantity) for shape in (first, second, third) for quantity in QUANTITIES[:3]]
    return listed + [("xla_dense", shape, "forward") for shape in (first, second, third)]


def run_job(implementation: str, shape: tuple[int, ...], quantity: str) -> dict:
    """One measurement, in this process."""
    calls, kinds = SHAPES[shape]
    if implementation == "hopper":
        return measure_hopper(shape, quantity, calls, kinds)
    return measure_dense(shape, calls) if implementation == "xla_dense" else measure_torch(shape, quantity, calls, kinds[:2])


def environment() -> dict[str, str]:
    """Versions and device of the run."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d")}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return {**found, "device": "no NVIDIA GPU"}
    return {**found, "device": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()}


def run_all(commands: list[list[str]], limit: float) -> list[str]:
    """What each command prints. All start at once; the GPU is theirs when every one is ready, has ended, or half the limit is over."""
    begin, env = time.monotonic(), {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as folder, LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        logs = [Path(folder, str(index)) for index in range(len(commands))]
        children = []
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as output:
                children.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env))
        while time.monotonic() - begin < limit / 2:
            if all(child.poll() is not None or READY in log.read_text() for child, log in zip(children, logs, strict=True)):
                break
            time.sleep(0.5)
        fcntl.flock(lock, fcntl.LOCK_UN)
        for child in children:
            try:
                child.wait(max(1.0, limit - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                child.kill()
        return [log.read_text() for log in logs]


def result_in(text: str) -> dict | None:
    """The result that a measurement printed, if it did."""
    found = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1].removeprefix("RESULT ")) if found else None


def main() -> None:
    """Runs all measurements, or one in a child process, and writes and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which measurements are given up")
    parser.add_argument("--job", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        print("RESULT " + json.dumps(run_job(*jobs()[arguments.job])), flush=True)
        return
    rows: dict[tuple, dict] = {}
    commands = [[sys.executable, __file__, "--job", str(index)] for index in range(len(jobs()))]
    for (implementation, shape, quantity), text in zip(jobs(), run_all(commands, arguments.limit), strict=True):
        result = result_in(text)
        if result is None:
            print(f"{implementation} {shape} {quantity}: no result. {text[-400:]}")
            continue
        temp_bytes, flops = result.pop("temp_bytes", None), 2 * shape[1] * shape[2] * shape[3]
        for kind, seconds in result.items():
            key = dict(zip(("groups", "rows", "k", "n"), shape, strict=True))
            row = rows.setdefault((implementation, *shape, kind), {"implementation": implementation, **key, "sizes": kind})
            row[f"{quantity}_tflops"] = round(flops / seconds[1] / 1e12, 1)
            row[f"{quantity}_spread"] = [round(flops / second / 1e12, 1) for second in reversed(seconds)]
            if temp_bytes is not None:
                row["temp_bytes"] = max(temp_bytes, row.get("temp_bytes", 0))
    report = {"environment": environment(), "rows": list(rows.values())}
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        rates = " ".join(f"{quantity} {row[f'{quantity}_tflops']:.0f}" for quantity in QUANTITIES if f"{quantity}_tflops" in row)
        print(row["implementation"], row["groups"], row["rows"], row["k"], row["n"], row["sizes"], rates, row.get("temp_bytes", ""))


if __name__ == "__main__":
    main()
