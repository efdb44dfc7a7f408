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
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
LIMITS_S = (120, 120, 240)


def interpret(
    inputs, segment_ids=None, *, lower_bound, blocks=132, computing=1, detect_races=False, cotangents=None, transition=False
) -> Any:
    """Output and final state (float32) and whether a race was found, from the eight inputs of the tests; the state may be None.

    `computing` is the number of warpgroups that compute in a block of the recurrences. With `cotangents`, those of the output and
    the final state, the inputs' gradients follow. With `transition`, the transition and the state from a zero start are all.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        arrays = {f"input_{i}": np.asarray(x, np.float32) for i, x in enumerate(inputs) if x is not None}
        if segment_ids is not None:
            arrays["segment_ids"] = np.asarray(segment_ids)
        if cotangents is not None:
            arrays["d_o"], arrays["d_state"] = (np.asarray(x, np.float32) for x in cotangents)
        np.savez(
            source, lower_bound=lower_bound, blocks=blocks, computing=computing, detect_races=detect_races, transition=transition, **arrays
        )
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=64"}
        command = [sys.executable, "-m", "tests.pallas_kernels.kda.hopper_interpreter", str(source), str(target)]
        result = _first_to_end(command, env, 1 if cotangents is None else 2)
        assert result.returncode == 0, result.stderr[-3000:]
        with np.load(target) as found:
            if transition:
                return found["transition"], found["zero_start"]
            results = found["o"], found["state"], bool(found["races"])
            return results if cotangents is None else (*results, [found[f"gradient_{i}"] for i in range(8)])


def _first_to_end(command, env, patience):
    for attempt, limit in enumerate((patience * limit for limit in LIMITS_S), 1):
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

    from pallas_kernels.kda.hopper import gradients, prepare, recurrence, reverse
    from pallas_kernels.kda.hopper.backward import kda_backward
    from pallas_kernels.kda.hopper.forward import kda_forward, kda_transition_forward

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # callbacks that compute can wait for the dispatching thread
    given = np.load(source)
    inputs: list[Any] = [jnp.asarray(given[f"input_{i}"], jnp.bfloat16 if i < 5 else jnp.float32) for i in range(7)]
    inputs.append(jnp.asarray(given["input_7"], jnp.float32) if "input_7" in given else None)
    prepare.BLOCKS = gradients.BLOCKS = int(given["blocks"])
    recurrence.compute_warpgroups = reverse.compute_warpgroups = lambda _: int(given["computing"])
    detect_races = bool(given["detect_races"])
    ids = jnp.asarray(given["segment_ids"]) if "segment_ids" in given else None
    options = {"lower_bound": float(given["lower_bound"]), "segment_ids_BT": ids}
    options["interpret"] = plgpu.InterpretGPUParams(detect_races=detect_races)
    if given["transition"]:
        results = jax.jit(functools.partial(kda_transition_forward, **options))(*inputs[1:7])
        np.savez(target, **dict(zip(("transition", "zero_start"), map(np.asarray, jax.block_until_ready(results)), strict=True)))
        return
    run = functools.partial(kda_forward, **options)
    o, state = jax.block_until_ready(jax.jit(run)(*inputs[:7], initial_state_BHKV=inputs[7]))
    found = {}
    if "d_o" in given:
        pull_back = jax.jit(functools.partial(kda_backward, **options))
        results = pull_back(*inputs, jnp.asarray(given["d_o"], jnp.bfloat16), jnp.asarray(given["d_state"]))
        found = {f"gradient_{i}": np.asarray(x, np.float32) for i, x in enumerate(jax.block_until_ready(results))}
    races = False
    if detect_races:  # JAX 0.12 raises at a race; 0.11 prints it and keeps its state
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        races = gpu_callbacks.get_races().races_found
    np.savez(target, o=np.asarray(o, np.float32), state=np.asarray(state), races=races, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
