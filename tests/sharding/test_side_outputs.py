"""Router counts on two devices: the same as on one, and no device waits for another inside the scan over layers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

ON_TWO = """
import json
import sys
from functools import partial
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from flax import nnx
from k3train.config import DtypePolicy, MeshConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.models import parameters
from k3train.models.layout import LocalLayout
from k3train.sharding.placement import place

config = ModelConfig(
    vocab_size=32, d_model=16, num_layers=3, num_dense_layers=0, mixer_pattern=("mla_rope",), last_mixer=None, width="latent_moe",
    attn_res_block_size=3, mla=MLAConfig(num_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_head_dim=4, rope_head_dim=4, v_head_dim=4),
    moe=MoEConfig(num_experts=6, experts_per_token=2, latent_dim=8, expert_dim=8, histogram_bins=50),
    dtypes=DtypePolicy(compute="float32"),
)
graphdef, shapes, axes = parameters.abstract(config)
rng = np.random.default_rng(0)
params = jax.tree.map(lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype(np.float32), shapes)
tokens = rng.integers(0, 32, (4, 10), dtype=np.int32)
segment_ids = np.where(np.arange(10) < [[10], [7], [0], [9]], 0, -1).astype(np.int32)

def loss(layout, params, tokens, segment_ids):
    output = nnx.merge(graphdef, params)(tokens, segment_ids, layout=layout, collect=True)
    return jnp.mean(jnp.square(output.logits_BTV)), output.aux

placement = place(MeshConfig(fsdp=2))
rows, lies = placement.batch, placement.params(axes, params)
quick = {"xla_backend_optimization_level": 0}
gradient = jax.grad(partial(loss, placement.layout), has_aux=True)
split = jax.jit(gradient, in_shardings=(lies, rows, rows), compiler_options=quick).lower(params, tokens, segment_ids).compile()
_, two = split(*(jax.device_put(x, at) for x, at in ((params, lies), (tokens, rows), (segment_ids, rows))))
_, one = jax.jit(partial(loss, LocalLayout()), compiler_options=quick)(params, tokens, segment_ids)
assert two["histogram"].addressable_shards[0].data.shape[1] == 1  # each device holds its own
plain = lambda aux: {name: np.asarray(value).tolist() for name, value in aux.items()}
json.dump({"one": plain(one), "two": plain(two), "program": split.as_text()}, open(sys.argv[1], "w"))
"""


def loop_bodies(program: str) -> str:
    """The text of all computations that a while loop runs, directly or through others."""
    blocks = {
        name: text for name, text in re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", program, flags=re.DOTALL | re.MULTILINE)
    }
    inside, waiting = set(), re.findall(r"body=%?([\w.\-]+)", program)
    while waiting:
        name = waiting.pop()
        if name in blocks and name not in inside:
            inside.add(name)
            waiting += re.findall(r"(?:calls|body|to_apply|condition)=%?([\w.\-]+)", blocks[name])
    return "\n".join(blocks[name] for name in inside)


@pytest.mark.numerics
def test_counts_on_two_devices(tmp_path: Path):
    file = tmp_path / "result.json"
    process = subprocess.run(
        [sys.executable, "-c", ON_TWO, str(file)], capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=500
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(file.read_text())
    one, two = ({name: np.array(value) for name, value in result[which].items()} for which in ("one", "two"))
    assert one["histogram"].shape == (3, 1, 6, 50) and two["histogram"].shape == (3, 2, 6, 50)
    np.testing.assert_array_equal(two["histogram"].sum(axis=1), one["histogram"][:, 0])
    np.testing.assert_array_equal(two["histogram"].sum(axis=-1), np.tile([[17], [9]], (3, 1, 6)))  # each device counts its own real tokens
    assert sorted(one) == sorted(two)
    for name in set(one) - {"histogram"}:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)

    body = loop_bodies(result["program"])
    assert "custom-call" in body or "dot(" in body  # the layers are in there
    collectives = re.findall(r"= (\S.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", body)
    assert collectives  # parameters are gathered there
    for shape, kind in collectives:
        assert not re.search(r"\b[su]\d+\[", shape), f"counts travel inside the scan: {kind} {shape}"
        assert not re.search(r"\[[24],10,", shape), f"activations travel: {kind} {shape}"
