"""Interprets KDA's Hopper kernels on arrays of a file: a process of its own, as the interpreter blocks a thread per warpgroup.

    python -m tests.pallas_kernels.kda.hopper_interpreter INPUT.npz OUTPUT.npz

XLA's CPU client has one thread per core or device, whichever is more. The interpreter's threads compile while others of the pool
wait at a barrier: with few threads it has been seen to wait forever (JAX 0.12), so there are many, a limit, and another attempt.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
LIMITS_S = (120, 120, 240)


def interpret(inputs, segment_ids=None, *, lower_bound, blocks=132, detect_races=False):
    """Output and final state (float32) and whether a race was found, from the eight inputs of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        arrays = {f"input_{i}": np.asarray(x, np.float32) for i, x in enumerate(inputs)}
        if segment_ids is not None:
            arrays["segment_ids"] = np.asarray(segment_ids)
        np.savez(source, lower_bound=lower_bound, blocks=blocks, detect_races=detect_races, **arrays)
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=64"}
        command = [sys.executable, "-m", "tests.pallas_kernels.kda.hopper_interpreter", str(source), str(target)]
        result = _first_to_end(command, env)
        assert result.returncode == 0, result.stderr[-3000:]
        with np.load(target) as found:
            return found["o"], found["state"], bool(found["races"])


def _first_to_end(command, env):
    for attempt, limit in enumerate(LIMITS_S, 1):
        try:
            return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            if attempt == len(LIMITS_S):
                raise
    raise AssertionError("no attempt was made")


def main(source: str, target: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.kda.hopper import prepare
    from pallas_kernels.kda.hopper.forward import kda_forward

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # callbacks that compute can wait for the dispatching thread
    given = np.load(source)
    inputs = [jnp.asarray(given[f"input_{i}"], jnp.bfloat16 if i < 5 else jnp.float32) for i in range(8)]
    prepare.BLOCKS, detect_races = int(given["blocks"]), bool(given["detect_races"])
    run = functools.partial(
        kda_forward, lower_bound=float(given["lower_bound"]), interpret=plgpu.InterpretGPUParams(detect_races=detect_races)
    )
    ids = jnp.asarray(given["segment_ids"]) if "segment_ids" in given else None
    o, state = jax.block_until_ready(jax.jit(run)(*inputs[:7], segment_ids_BT=ids, initial_state_BHKV=inputs[7]))
    races = False
    if detect_races:  # JAX 0.12 raises at a race; 0.11 prints it and keeps its state
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        races = gpu_callbacks.get_races().races_found
    np.savez(target, o=np.asarray(o, np.float32), state=np.asarray(state), races=races)


if __name__ == "__main__":
    main(*sys.argv[1:])
