"""A small Kimi K3 on real text, in a few minutes on two CPU cores.

    k3train train experiments/quickstart.py
    k3train train experiments/quickstart.py --name mine --data.sources my_texts/ --optimizer.peak-lr 2e-3

All of K3's mechanisms are here, only narrow: three Kimi Delta Attention layers to one gated latent attention layer, the last layer always
attention; Attention Residuals over blocks of four layers; a dense first layer, then experts in a latent with shared experts.
Bytes are the tokens, Python's standard library is the text.
"""

from k3train.config import (
    CheckpointConfig,
    DataConfig,
    DtypePolicy,
    EvaluationConfig,
    Experiment,
    KDAConfig,
    LoggingConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
)


def experiment() -> Experiment:
    """1.4 M parameters, 1.1 M of them active per byte; 32 x 128 bytes per step."""
    return Experiment(
        name="quickstart",
        model=ModelConfig(
            vocab_size=257,
            d_model=128,
            num_layers=5,
            num_dense_layers=1,
            dense_dim=384,
            attn_res_block_size=4,
            kda=KDAConfig(num_heads=4, head_dim=32),
            mla=MLAConfig(num_heads=4, q_lora_rank=64, kv_lora_rank=32, nope_head_dim=32, rope_head_dim=16, v_head_dim=32),
            moe=MoEConfig(num_experts=8, experts_per_token=4, latent_dim=64, expert_dim=96, num_shared_experts=1),
            init_std=0.07,  # near 1 / sqrt(d_model); the released 0.02 fits a width of 7168
            dtypes=DtypePolicy(compute="float32"),
            remat="none",
        ),
        data=DataConfig(sequence_length=128, batch_size=32),
        schedule=ScheduleConfig(steps=190, warmup_fraction=0.05),
        optimizer=OptimizerConfig(
            peak_lr=4e-3,
            muon=MuonConfig(newton_schulz_dtype="float32"),  # CPUs have no fast bfloat16 products
            quantile_momentum=0.5,  # 32 rows are few: one odd file among them should not move every bias
        ),
        checkpoint=CheckpointConfig(every_steps=60),
        logging=LoggingConfig(every_steps=5),
        evaluation=EvaluationConfig(every_steps=60, batches=6, sample_prompt="def "),
    )
