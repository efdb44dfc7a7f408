"""A Kimi K3 of 100 M parameters in bfloat16 on the built-in text: the smallest model that is worth a GPU.

    k3train train experiments/k3_100m.py

Thirteen layers, three Kimi Delta Attention layers to one gated latent attention layer, the last one attention too; Attention Residuals over
blocks of four layers; 64 experts of which four work on a token. Bytes are the tokens.
"""

from k3train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    Experiment,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ScheduleConfig,
)


def experiment() -> Experiment:
    """104 M parameters, 33 M of them active per byte; 32,768 bytes per step."""
    return Experiment(
        name="k3-100m",
        model=ModelConfig(
            vocab_size=257,
            d_model=512,
            num_layers=13,
            num_dense_layers=1,
            dense_dim=1536,
            attn_res_block_size=4,
            kda=KDAConfig(num_heads=4, head_dim=128),
            mla=MLAConfig(num_heads=4, q_lora_rank=256, kv_lora_rank=128, nope_head_dim=128, rope_head_dim=64, v_head_dim=128),
            moe=MoEConfig(num_experts=64, experts_per_token=4, latent_dim=256, expert_dim=128, num_shared_experts=2),
            init_std=0.04,  # near 1 / sqrt(d_model)
        ),
        data=DataConfig(sequence_length=2048, batch_size=16),
        schedule=ScheduleConfig(steps=2000, warmup_fraction=0.05),
        optimizer=OptimizerConfig(peak_lr=2e-3),
        checkpoint=CheckpointConfig(every_steps=1000),
        evaluation=EvaluationConfig(every_steps=500, batches=16),
    )
