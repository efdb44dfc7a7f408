"""One whole train step of a small K3, sharded over a TPU topology, compiled with the TPU kernels in it."""

from __future__ import annotations

import pytest

from k3train.config import DataConfig, Experiment, KDAConfig, MeshConfig, MLAConfig, ModelConfig, MoEConfig, ScheduleConfig
from tests.tpu.chips import VMEM, describe, kernels_vmem

pytestmark = pytest.mark.aot
FIRST, LATER = (), pytest.mark.slow


def small_k3(num_devices: int) -> Experiment:
    """Every mechanism of K3 at widths that fill lanes: a layer of KDA and one of MLA with experts, a block each; two rows a device."""
    model = ModelConfig(
        vocab_size=512,
        d_model=256,
        num_layers=2,
        mixer_pattern=("kda", "gated_mla"),
        last_mixer=None,
        dense_dim=512,
        attn_res_block_size=1,
        kda=KDAConfig(num_heads=2, head_dim=128),
        mla=MLAConfig(num_heads=2, q_lora_rank=128, kv_lora_rank=128, nope_head_dim=128, rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(num_experts=16, experts_per_token=4, latent_dim=128, expert_dim=128, num_shared_experts=1),
    )
    return Experiment(
        name="small_k3",
        model=model,
        mesh=MeshConfig(replica=2),
        data=DataConfig(sources=("none",), sequence_length=256, batch_size=2 * num_devices),
        schedule=ScheduleConfig(steps=10),
    )


# The same program in two minutes more for each of the others: `make test-tpu AOT=aot` compiles those too.
@pytest.mark.parametrize("topology", [pytest.param(name, marks=FIRST if name.startswith("v5p") else LATER) for name in VMEM], indirect=True)
def test_a_whole_train_step_compiles(topology, devices, monkeypatch):
    from k3train.sharding import placement
    from k3train.sharding.mesh import make_mesh
    from k3train.train.assembly import assemble

    monkeypatch.setattr(placement, "make_mesh", lambda config: make_mesh(config, devices))
    assembly = assemble(small_k3(len(devices)), boundary_id=0)
    compiled = assembly.train_step.lower(assembly.target, assembly.batch).compile()
    kernels = kernels_vmem(compiled)
    print(describe(f"{topology} train step of a small K3 on {len(devices)} devices", compiled))
    for name, vmem in kernels.items():
        print(f"{topology} train step, kernel {name}: VMEM {vmem / 2**20:.1f} MiB")
    assert {"grouped_matmul_rows", "grouped_matmul_rows_transposed", "grouped_matmul_weights"} <= set(kernels)
    assert any("kda" in name for name in kernels), kernels
    assert max(kernels.values()) <= VMEM[topology]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes  # the state is updated in place
