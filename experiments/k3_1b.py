"""A Kimi K3 of one billion parameters in bfloat16 on the built-in text: one GPU's worth of the whole method.

    k3train train experiments/k3_1b.py

Ten layers, three Kimi Delta Attention layers to one gated latent attention layer, the last one attention too; Attention Residuals over
blocks of four layers; 128 experts of which eight work on a token. Bytes are the tokens; the text is far too little for a model of this
size, so it serves to measure speed and to compare kernels.
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
    """1.0 B parameters, 157 M of them active per byte; 32,768 bytes per step."""
    return Experiment(
        name="k3-1b",
        model=ModelConfig(
            vocab_size=257,
            d_model=1024,
            num_layers=10,
            num_dense_layers=1,
            dense_dim=3072,
            attn_res_block_size=4,
            kda=KDAConfig(num_heads=8, head_dim=128),
            mla=MLAConfig(num_heads=8, q_lora_rank=512, kv_lora_rank=256, nope_head_dim=128, rope_head_dim=64, v_head_dim=128),
            moe=MoEConfig(num_experts=128, experts_per_token=8, latent_dim=512, expert_dim=512, num_shared_experts=2),
            init_std=0.03,  # near 1 / sqrt(d_model)
        ),
        data=DataConfig(sequence_length=2048, batch_size=16),
        schedule=ScheduleConfig(steps=1000, warmup_fraction=0.05),
        optimizer=OptimizerConfig(peak_lr=1e-3),
        checkpoint=CheckpointConfig(every_steps=1000),
        evaluation=EvaluationConfig(every_steps=500, batches=16),
    )
