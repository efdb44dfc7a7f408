"""What an experiment is: frozen, keyword-only dataclasses and the rules they must keep. Imports no array library.

`Experiment.validate()` checks everything before any array exists and reports every problem at once, by field.
Defaults follow the K3 technical report and the released `config.json` where these state a value.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from k3train.errors import UserError

Mixer = Literal["kda", "gated_mla", "mla_rope"]
Depth = Literal["block_attention_residuals", "full_attention_residuals", "residual"]
Width = Literal["latent_moe", "moe", "dense"]
Activation = Literal["situ_glu", "swiglu"]
Balancing = Literal["quantile", "sign", "none"]
ScheduleKind = Literal["cosine", "wsd", "constant"]
Float = Literal["bfloat16", "float32", "float64"]
Kernels = Literal["auto", "xla"]


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Which float type holds what. Gates, states, softmax, norms' statistics and the router stay in at least FP32."""

    parameters: Float = "float32"
    """Parameters and optimizer master values."""
    compute: Float = "bfloat16"
    """Activations and matmul operands."""


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (report 2.1.1)."""

    num_heads: int = 96
    head_dim: int = 128
    """Key and value channels of a head; also the width of the decay gate's bottleneck."""
    conv_width: int = 4
    """Taps of the short causal convolutions on q, k and v."""
    gate_lower_bound: float = -5.0
    """Smallest log decay per token, in nats; the chunked kernels need -5 <= bound < 0."""


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: gated and without positions (report 2.1.2), or as `mla_rope` ungated and rotary (K2)."""

    num_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    nope_head_dim: int = 128
    rope_head_dim: int = 64
    """Width of the key part shared by all heads (a rotary slot that K3 does not rotate)."""
    rope_theta: float = 50000.0
    """Base of the rotation's wavelengths; read by `mla_rope` alone."""
    v_head_dim: int = 128
    latent_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts: in a normalised latent (Stable LatentMoE, report 2.3) or on the full width (`moe`)."""

    num_experts: int = 896
    experts_per_token: int = 16
    latent_dim: int = 3584
    """Width of the latent; read by `latent_moe` alone."""
    expert_dim: int = 3072
    num_shared_experts: int = 2
    """Shared experts, each of width `expert_dim`, on the full model width."""
    routed_scaling: float = 1.0
    """Factor on the routed experts' sum. The latent's norm takes it out again, so that it matters to `moe` alone."""
    balancing: Balancing = "quantile"
    """How the router bias evens the load: quantiles of the batch (report 2.3.3), the sign of the excess (K2), or not at all."""
    histogram_bins: int = 1000
    """Bins per expert of the quantile estimate (report App. D)."""
    force_balanced: bool = False
    """Routes token t to experts t k, t k + 1, ... modulo their number, whatever the scores: for timing, not for training."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: a mixer pattern along the sequence, Attention Residuals along the depth, experts along the width.

    Every default is K3; the other values of `mixer_pattern`, `depth`, `width` and `activation` are its ablations and K2.
    """

    vocab_size: int = 163840
    d_model: int = 7168
    num_layers: int = 93
    mixer_pattern: tuple[Mixer, ...] = ("kda", "kda", "kda", "gated_mla")
    """Repeated along the depth."""
    last_mixer: Mixer | None = "gated_mla"
    """Mixer of the last layer, whatever the pattern says; None keeps the pattern."""
    depth: Depth = "block_attention_residuals"
    """What a sublayer reads: a mix of blocks, a mix of all earlier sublayers' outputs, or their plain sum."""
    attn_res_block_size: int = 12
    """Decoder layers whose outputs form one source of the block Attention Residuals."""
    width: Width = "latent_moe"
    num_dense_layers: int = 1
    """First layers with a dense feed-forward block in place of experts."""
    dense_dim: int = 33792
    activation: Activation = "situ_glu"
    norm_eps: float = 1e-5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    init_std: float = 0.02
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    remat: Literal["layer", "none"] = "layer"
    """`layer` keeps one residual stream per layer and recomputes the rest in the backward pass; `none` keeps all."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of every layer."""
        repeats = math.ceil(self.num_layers / len(self.mixer_pattern))
        mixers = (self.mixer_pattern * repeats)[: self.num_layers]
        return mixers if self.last_mixer is None else (*mixers[:-1], self.last_mixer)

    @property
    def feed_forwards(self) -> tuple[Width, ...]:
        """The feed-forward block of every layer."""
        return tuple("dense" if layer < self.num_dense_layers else self.width for layer in range(self.num_layers))


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices share each kind of work; the degrees multiply to the device count."""

    replica: int = 1
    """Copies of the parameters, each fed with its own rows."""
    fsdp: int | None = None
    """Devices that share one copy of parameters, gradients and optimizer state (ZeRO-3), each fed with its own rows;
    None takes all devices that the other degrees leave."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text in, packed rows out."""

    sources: tuple[str, ...] = ()
    """Text files and folders (searched recursively); none stands for the built-in corpus, Python's standard library."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Endings of the files that are read from a folder."""
    heldout_fraction: float = 0.05
    """Share of the files kept for evaluation, chosen by a hash of their names."""
    sequence_length: int = 512
    batch_size: int = 8
    """Rows in one optimizer step, over all devices and microbatches."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Length of the run and the learning rate's course: a linear warm-up, then one of three kinds."""

    steps: int = 1000
    kind: ScheduleKind = "cosine"
    """`cosine` falls from the warm-up's end on (report 3.3), `wsd` stays at the peak and falls linearly at the end, `constant` stays."""
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.2
    """Share of the steps in which `wsd` falls."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Per-Head Muon on matrices (report 2.5)."""

    peak_lr: float | None = None
    """None: `optimizer.peak_lr`; the updates' size matches AdamW's, so that one rate serves both."""
    kind: ScheduleKind | None = None
    """None: `schedule.kind`."""
    momentum: float = 0.95
    weight_decay: float = 0.1
    newton_schulz_steps: int = 5
    newton_schulz_dtype: Float = "bfloat16"
    """Operands of the orthogonalisation's products, which accumulate in at least float32."""
    per_head_gates: bool = False
    """Splits the output gates and KDA's decay projection by heads too, as some ports do."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW on embeddings, head, vectors and convolutions."""

    peak_lr: float | None = None
    """None: `optimizer.peak_lr`."""
    kind: ScheduleKind | None = None
    """None: `schedule.kind`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay of the matrices among them; vectors, norms and gates' offsets are exempt."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Finite gate, global-norm clip, an update rule per kind of parameter, QK-clip."""

    peak_lr: float = 1e-3
    matrices: Literal["muon", "adamw"] = "muon"
    """Rule for the matrices inside the layers."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    clip_norm: float = 1.0
    qk_clip: float | None = 100.0
    """Largest attention logit that a head may reach before its query and key weights are scaled down; None: no limit."""
    quantile_momentum: float = 0.0
    """Share of the old router bias that stays under `model.moe.balancing = quantile`: smooths over steps of few tokens (report App. D)."""
    sign_balance_rate: float = 1e-3
    """Step of the router bias under `model.moe.balancing = sign`."""
    max_skipped_steps: int = 10
    """Consecutive steps with a non-finite loss or gradient, each left out, before the run stops."""
    microbatches: int = 1
    """Parts in which a step's rows are run one after another, gradients summed in FP32."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many saves to keep."""

    every_steps: int = 500
    every_minutes: float | None = None
    """Saves also when that long has passed since the last save."""
    keep: int = 3
    """Newest saves that are kept."""
    keep_every_steps: int | None = None
    """Saves at multiples of this are kept for good."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written while training."""

    every_steps: int = 10
    """Steps between two lines of `metrics.jsonl`."""
    tensorboard: bool = True
    """Writes the same figures to `tensorboard/`."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Loss on held-out text."""

    every_steps: int = 500
    batches: int = 16
    """Batches of held-out rows; fewer if there is less text."""
    sample_prompt: str | None = None
    """A finished run shows how it continues this text; None: no sample."""
    sample_tokens: int = 256
    """Length of that sample."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run."""

    name: str
    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runs_folder: str = "runs"
    """The run is written to `runs_folder/name`."""
    seed: int = 0
    """Seed of the parameters' initialisation."""
    kernels: Kernels = "auto"
    """`auto`: those written for the device where they apply (the choice is logged), else XLA's forms; `xla`: these alone, to compare."""
    deterministic: bool = False
    """On GPUs: only kernels whose results do not change from run to run, tuned once per run folder. Elsewhere it changes nothing."""

    def validate(self) -> Experiment:
        """Returns itself, or raises `UserError` with every broken rule, one line per field."""
        problems = [*_nonpositive(self), *_broken_rules(self)]
        if problems:
            raise UserError("The experiment's configuration does not hold together:\n" + "\n".join(f"  {problem}" for problem in problems))
        return self


MAY_BE_ZERO = {
    "num_dense_layers", "weight_decay", "warmup_fraction", "decay_fraction", "final_fraction", "num_shared_experts", "seed", "momentum",
    "quantile_momentum", "sign_balance_rate",
}  # fmt: skip
MAY_BE_NEGATIVE = {"gate_lower_bound"}
MAX_SEED = 2**32 - 1  # what a random key of 32-bit words takes


def _nonpositive(node: object, path: str = "") -> Iterator[str]:
    """Every number in the tree of dataclasses that must be positive and is not, with its dotted path."""
    for item in dataclasses.fields(node):  # type: ignore[arg-type]
        value, where, name = getattr(node, item.name), f"{path}{item.name}", item.name
        if dataclasses.is_dataclass(value):
            yield from _nonpositive(value, f"{where}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name not in MAY_BE_NEGATIVE:
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
                least = "zero or more" if name in MAY_BE_ZERO else "greater than zero"
                yield f"{where} = {value}: must be {least}{'' if math.isfinite(value) else ' and finite'}"


def _broken_rules(experiment: Experiment) -> Iterator[str]:
    """Rules that tie fields together."""
    model, data, mesh, optimizer = experiment.model, experiment.data, experiment.mesh, experiment.optimizer
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", experiment.name):
        yield f"name = {experiment.name!r}: must be a plain folder name of letters, digits and _ . + = -"
    if "" in data.sources:
        yield "data.sources holds an empty name: name a file or a folder"
    for path, seed in (("seed", experiment.seed), ("data.seed", data.seed)):
        if seed > MAX_SEED:
            yield f"{path} = {seed}: must be at most {MAX_SEED}"
    if not model.mixer_pattern:
        yield "model.mixer_pattern is empty: name at least one mixer"
    if not -5.0 <= model.kda.gate_lower_bound < 0.0:
        yield f"model.kda.gate_lower_bound = {model.kda.gate_lower_bound}: must be in [-5, 0), else a 16-token tile overflows"
    if model.moe.experts_per_token > model.moe.num_experts:
        yield f"model.moe.experts_per_token = {model.moe.experts_per_token}: model.moe.num_experts = {model.moe.num_experts} is fewer"
    if model.num_dense_layers > model.num_layers:
        yield f"model.num_dense_layers = {model.num_dense_layers}: only model.num_layers = {model.num_layers} exist"
    if data.heldout_fraction >= 1.0:
        yield f"data.heldout_fraction = {data.heldout_fraction}: must be below 1"
    fsdp = mesh.fsdp or 1  # unknown until the devices are
    rows = optimizer.microbatches * mesh.replica * fsdp
    if rows > 0 and data.batch_size % rows:
        yield (
            f"data.batch_size = {data.batch_size}: must be a multiple of optimizer.microbatches * mesh.replica * mesh.fsdp"
            f" = {optimizer.microbatches} * {mesh.replica} * {fsdp} = {rows}"
        )
    for path, value in (
        ("schedule.warmup_fraction", experiment.schedule.warmup_fraction),
        ("schedule.decay_fraction", experiment.schedule.decay_fraction),
        ("schedule.final_fraction", experiment.schedule.final_fraction),
    ):
        if value > 1.0:
            yield f"{path} = {value}: must be at most 1"
    if "mla_rope" in (*model.mixer_pattern, model.last_mixer) and model.mla.rope_head_dim % 2:
        yield f"model.mla.rope_head_dim = {model.mla.rope_head_dim}: must be even to be rotated"
    for path, value in (
        ("optimizer.adamw.beta1", optimizer.adamw.beta1),
        ("optimizer.adamw.beta2", optimizer.adamw.beta2),
        ("optimizer.muon.momentum", optimizer.muon.momentum),
        ("optimizer.quantile_momentum", optimizer.quantile_momentum),
    ):
        if value >= 1.0:
            yield f"{path} = {value}: must be below 1"
