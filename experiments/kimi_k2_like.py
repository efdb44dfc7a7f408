"""A model of Kimi K2's kind: what K3 was built from, as one more configuration of the same decoder.

    k3train summary experiments/kimi_k2_like.py

Rotary latent attention in every layer, plain residual connections, SwiGLU, experts on the full width, and a router bias that moves by the
sign of each expert's excess load. The shape is K2's published one. It counts 1.026 T parameters, 31.7 B of them active per token, or 32.9 B
with the embedding table; K2's report prints 1.04 T and 32.6 B. Batch, learning rate and length of the run are placeholders.
"""

from k3train.config import DataConfig, Experiment, MLAConfig, ModelConfig, MoEConfig, OptimizerConfig, ScheduleConfig


def experiment() -> Experiment:
    """K2's shape."""
    return Experiment(
        name="kimi-k2-like",
        model=ModelConfig(
            vocab_size=163840,
            d_model=7168,
            num_layers=61,
            mixer_pattern=("mla_rope",),
            last_mixer=None,
            depth="residual",
            width="moe",
            num_dense_layers=1,
            dense_dim=18432,
            activation="swiglu",
            mla=MLAConfig(
                num_heads=64, q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, rope_theta=50000.0, v_head_dim=128
            ),
            moe=MoEConfig(
                num_experts=384, experts_per_token=8, expert_dim=2048, num_shared_experts=1, routed_scaling=2.827, balancing="sign"
            ),
        ),
        data=DataConfig(sequence_length=4096, batch_size=4096),
        schedule=ScheduleConfig(steps=1_000_000, kind="wsd"),
        optimizer=OptimizerConfig(peak_lr=2e-4, qk_clip=100.0),
    )
