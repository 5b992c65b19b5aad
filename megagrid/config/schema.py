"""The recipe: every key that a run has, its type, default and unit. Nothing else configures a run.

Sections are frozen and strict: an unknown key is refused, a wrong type is refused, and once built
a `Config` doesn't change. Rules that tie keys of several sections together live in
`megagrid.config.rules`; presets that fill `[model]` live in `megagrid.config.presets`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

# Integers end where torch's and numpy's do.
PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Scale = Annotated[float, Field(gt=0, le=2.0**100)]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
ExportDtype = Literal["fp32", "bf16", "fp16"]
ContextParallel = Literal["all_gather", "ring", "ulysses"]
Recompute = Literal["none", "selective", "full"]
OptimizerName = Literal["adamw", "sgd", "muon"]
MuonScale = Literal["original", "match_rms_adamw"]
RankOrder = Literal["topology", "launcher"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "NO_SHARD"]


def _yes_no_or_ranks(value: object) -> object:
    """A union of types would be refused once for each of them."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and 0 < value < 2**63):
        return value
    raise PydanticCustomError("ranks", "Input should be true, false or a number of ranks")


YesNoOrRanks = Annotated[bool | int | None, PlainValidator(_yes_no_or_ranks)]


class Section(BaseModel):
    """A table of the recipe. Keys are checked, values are typed, the result is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Section):
    """Shape of the network. A preset fills what isn't stated; without one, state the shape."""

    preset: str | None = None
    """Name of a row of `megagrid.config.presets.PRESETS`."""
    family: Literal["gpt", "llama"] = "llama"
    """gpt: learned positions, LayerNorm, GELU, biases. llama: RoPE, RMSNorm, SwiGLU, no biases."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)]
    """More is a typing error, and would be laid out layer by layer."""
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    """Heads that share one key/value: equal to num_heads for MHA, 1 for MQA, between for GQA."""
    head_dim: PositiveInt
    """Width of one head; hidden_size / num_heads unless stated."""
    vocab_size: PositiveInt
    """Rows of the embedding before padding; token ids are below it."""
    max_seq_length: PositiveInt
    """Longest input that the positions allow, in tokens."""
    tied_embeddings: bool = False
    """The output head reuses the token embedding."""
    norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling = "none"
    """What was done to RoPE's frequencies for longer inputs: all divided by a factor ("linear"), or
    the low ones (Llama 3.1, "llama3"; "yarn"). See `megagrid.nn.rope`."""
    rope_scaling_factor: PositiveFloat | None = None
    """linear, llama3, yarn: what frequencies are divided by."""
    rope_low_freq_factor: PositiveFloat | None = None
    """llama3, yarn (beta_slow): frequencies of fewer turns in rope_original_max_seq_length are
    divided."""
    rope_high_freq_factor: PositiveFloat | None = None
    """llama3, yarn (beta_fast): frequencies of more turns are left alone, between the two it is
    blended."""
    rope_original_max_seq_length: PositiveInt | None = None
    """llama3, yarn: the longest input before the scaling, in tokens."""
    rope_attention_factor: PositiveFloat | None = None
    """yarn: what rotated queries and keys are multiplied by; None: 0.1 ln(factor) + 1."""
    qkv_bias: bool = False
    """Queries, keys and values alone have biases, as in Qwen2 (llama; a gpt has all of them)."""
    qk_norm: bool = False
    """Each head's query and key go through an RMSNorm before they are rotated, as in Qwen3
    (llama)."""
    dropout: BelowOne = 0.0
    """On the embedding and on each residual branch (gpt)."""
    attention_dropout: BelowOne = 0.0
    """On the attention probabilities (gpt)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual projections are divided by sqrt(2 L)."""
    mup_base_width: PositiveInt | None = None
    """The hidden_size at which init_std and the learning rate were found; at others muP scales them
    (Yang et al. 2022), see `megagrid.model.width`. None: nothing is scaled."""
    mup_base_head_dim: PositiveInt | None = None
    """The head_dim of that model, if this one's differs."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times tensor_parallel_size."""


class ParallelConfig(Section):
    """The grid: how many ranks along each axis, and what each axis does."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each sample."""
    context_parallel: ContextParallel = "all_gather"
    """How they attend to each other's: all keys and values on each of them ("all_gather"), or going
    round ("ring"), or all tokens of some of the heads ("ulysses"). See `megagrid.nn.context`."""
    data_parallel_size: PositiveInt | None = None
    """None: whatever the ranks leave after tp, pp and cp."""
    min_data_parallel_size: PositiveInt | None = None
    """Fewest that the run may have instead, with the same batches, when it has lost nodes (see
    `megagrid train --nnodes`) or is started on fewer ranks. None: data_parallel_size."""
    sequence_parallel: bool = False
    """Norms and residuals sharded along the sequence over the tp axis."""
    pipeline_schedule: ScheduleName = "1F1B"
    pipeline_schedule_file: str | None = None
    """A schedule as `megagrid schedule --save` writes it, run in place of `pipeline_schedule`."""
    virtual_pipeline_size: PositiveInt = 1
    """Chunks of layers on each pipeline rank."""
    layers_per_stage: list[NonNegativeInt] | None = None
    """Layers of each stage, first to last; None: balanced by cost."""
    stage_memory_gb: PositiveFloat | None = None
    """Most that the parameters, gradients and optimizer states of a pipeline rank's stages may take
    in one process, in 10^9 bytes; see `megagrid.pipeline.partition`. None: no limit."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What the ranks of the dp axis split among them: parameters, gradients and optimizer states
    (FULL_SHARD), the same with parameters kept gathered during the step (SHARD_GRAD_OP), the same
    inside a node and repeated on each (HYBRID_SHARD), optimizer states alone (ZERO1), nothing
    (NO_SHARD). See `megagrid.config.sharding`."""
    shard_size: PositiveInt | None = None
    """HYBRID_SHARD: ranks that split a parameter; None: those of a dp group that share a node."""
    reshard_after_forward: YesNoOrRanks = None
    """What becomes of gathered parameters after a forward: let go of (true), kept (false), or split
    over so many neighbours (an integer). None: true, but false where `hold_for_step`."""
    hold_for_step: bool | None = None
    """Gathered parameters stay from a step's first forward to its last backward; false: a backward
    lets go of them. None: as the strategy has it, true of SHARD_GRAD_OP alone."""
    blocks_per_unit: PositiveInt = 1
    """Layers whose parameters are gathered, and gradients reduced, in one message."""
    wrap_embedding: bool = False
    """The token embedding is a unit of its own, gathered only while it computes, not with all that
    a stage has beside layers. A table that is also the head of its stage stays there."""
    wrap_head: bool = False
    """The same of the output head."""
    unsharded_modules: list[str] = []
    """Modules that every rank holds whole, such as "norm" or "layers.*.attention_norm"."""
    forward_prefetch: NonNegativeInt = 1
    """Units whose gathering is begun while the one before them computes."""
    backward_prefetch: NonNegativeInt = 1
    """The same in backward, where units are met in reverse."""
    allow_tp_across_nodes: bool = False
    """Warn about a tp group that crosses nodes instead of refusing it."""
    rank_order: RankOrder = "topology"
    """How ranks are numbered: those of a node one after the other, and nodes of a switch
    ("topology"), which leaves an order alone that is so already; or as the launcher does
    ("launcher")."""
    topology_file: str | None = None
    """Which switch each node hangs on, in the form of SLURM's topology.conf; None: what SLURM says
    of it. See `megagrid.grid.topology.load_topology`."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all ranks of the pp axis."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size


class MemoryConfig(Section):
    """What is kept elsewhere, or not kept, to leave a device more of its memory."""

    cpu_offload: bool = False
    """Parameters, gradients and optimizer states lie in the host's memory, where the optimizer
    computes; parameters come to the device unit by unit, as they are needed."""
    recompute: Recompute = "none"
    """What backward computes again in place of keeping it: nothing; attention, norms and
    activations, which cost little for what they keep ("selective"); whole layers, of which just the
    input is kept ("full")."""
    recompute_interval: PositiveInt = 1
    """full: one of so many layers is recomputed, counted from the model's first."""
    activation_offload: bool = False
    """What layers keep for their backward goes to the host's memory meanwhile, beside what the
    device computes."""


class TrainConfig(Section):
    """The work of the run."""

    seq_length: PositiveInt
    """Tokens of a sample that are trained on."""
    micro_batch_size: PositiveInt = 1
    """Samples that one forward of one data-parallel rank takes."""
    global_batch_size: PositiveInt
    """Samples of one optimizer step over the whole grid."""
    steps: PositiveInt | None = None
    """Optimizer steps of the run; state this or `tokens`."""
    tokens: PositiveInt | None = None
    """Token budget of the run; steps = ceil(tokens / (global_batch_size * seq_length))."""
    seed: NonNegativeInt = 1234
    precision: Precision = "fp32"
    """bf16, fp16: compute in it with fp32 master weights, fp32 gradient reduction and optimizer.
    fp16's gradients are computed of a scaled loss, see `LossScaleConfig`."""
    float8: Literal["off", "on", "emulated"] = "off"
    """Matrix products of layers, under precision="bf16", in float8 by torchao: needs Ada, Hopper or
    later. "emulated" rounds alike on any device, to try it. See `megagrid.nn.float8`."""
    deterministic: bool = False
    """Two runs are bit by bit the same on accelerators too, which costs some speed. On a CPU they
    always are."""
    z_loss: Fraction = 0.0
    """Coefficient of log²Z, added to each token's loss so that logits don't drift (PaLM: 1e-4). The
    loss that is reported is the cross-entropy alone."""
    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens of a microbatch whose logits exist at a time; 0: all. The gradient of the head's
    weight is then made with the loss, and kept from the last stage's forward to its backward."""
    compile: bool = False
    """Each block through torch.compile, without a break in its graph, once for all blocks of a
    rank. On a CPU it needs a C++ compiler."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """What makes code of the graphs; aot_eager runs them as they are, to find a fault with."""
    device: str = "auto"
    """"auto": the accelerator if there is one, else cpu; or a device type by name."""
    timeout_seconds: Annotated[float, Field(gt=0, le=10_000_000)] = 600.0
    """A collective that waits longer ends the job, with a word on which rank is to blame."""
    setup_timeout_seconds: Annotated[float, Field(gt=0, le=10_000_000)] = 1800.0
    """The same until a rank has made a step, while ranks start, load, and index their data, some of
    which one does for all; `timeout_seconds` if that is longer."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads, over the whole grid."""
        return self.global_batch_size * self.seq_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, whichever of `steps` and `tokens` states its length."""
        if self.steps is not None:
            return self.steps
        return -(-self.tokens // self.tokens_per_step)


class OptimizerConfig(Section):
    """What updates the weights. Norm weights, biases and 1-d parameters aren't decayed."""

    name: OptimizerName = "adamw"
    """adamw: AdamW (Loshchilov & Hutter 2019). sgd: with momentum. muon: hidden matrices by Muon
    (Jordan et al. 2024), embedding, head, norms and biases by AdamW."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate. Gradients are means over tokens, so it doesn't depend on the grid."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    """adamw, muon: AdamW's; beta1 and beta2 of its moments, and what is added to the root of the
    second."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """adamw: of its moments between steps; they are updated in the weights' dtype. bf16 halves
    them. (Under precision="fp64", fp32 stands for fp64.)"""
    adamw_lr: PositiveFloat | None = None
    """muon: peak learning rate of what AdamW updates; None: lr."""
    momentum: BelowOne = 0.95
    """sgd, muon: share of the last step's momentum that stays in it."""
    nesterov: bool = True
    """sgd, muon: look ahead by a step of the momentum."""
    muon_scale: MuonScale = "match_rms_adamw"
    """muon: what an orthogonal update of r rows and c columns is multiplied by. match_rms_adamw:
    0.2 sqrt(max(r, c)), so that AdamW's learning rates serve. original: sqrt(max(1, r / c))."""
    muon_steps: Annotated[int, Field(gt=0, le=100)] = 5
    """muon: iterations of Newton and Schulz."""
    muon_dtype: Literal["fp32", "bf16"] = "fp32"
    """muon: what they are computed in; bf16 is for accelerators."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled from gradients: a step takes lr * weight_decay of a weight off it."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


class LossScaleConfig(Section):
    """What the loss is multiplied by under train.precision="fp16", so that small gradients aren't
    rounded to zero; weights, norms and clipping see gradients without it. Powers of two cost no
    digit. See `megagrid.optim.loss_scale`."""

    initial: Scale = 65536.0
    """Of a run's first step; a resumed run goes on with its own."""
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    growth_interval: PositiveInt = 1000
    """Steps in a row without overflow after which it grows."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What it is multiplied by when gradients overflow."""
    hysteresis: PositiveInt = 2
    """Overflows since it last grew that lower it; those before only skip their steps."""
    min: Scale = 1.0
    """It is never lower. Gradients that aren't finite at it are `guard.on_nan`'s."""


class LRScheduleConfig(Section):
    """Learning rate over steps, without those skipped: linear warmup, then the shape named."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt | None = None
    """cosine, linear: steps from the end of the warmup to the minimum (None: to the last step);
    wsd: length of the final decay (None: a tenth of the run)."""
    min_lr_ratio: Fraction = 0.1
    """Final over peak learning rate."""


class GuardConfig(Section):
    """What becomes of a step whose numbers can't be right, decided alike by every rank. See
    `megagrid.train.guards`.

    "skip": neither weights nor learning rate move. "rollback": the last sound checkpoint of the run
    is loaded, and training goes on from it with the data after this step's. "end": the run ends.
    """

    on_nan: Literal["end", "skip", "rollback"] = "end"
    """A loss or gradient norm that is NaN or Inf (and under fp16 no overflow)."""
    on_spike: Literal["off", "skip", "rollback"] = "off"
    """A loss or gradient norm far above those of the window's steps."""
    window: Annotated[int, Field(ge=2, le=100_000)] = 100
    """Steps last made that the next is held against; until there are as many, no step is."""
    loss_deviations: PositiveFloat = 6.0
    """A loss is a spike if above the window's mean by more of its standard deviations."""
    norm_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A gradient norm is a spike if above so many times the window's median."""
    max_skips: PositiveInt = 10
    """Steps in a row that are skipped for such reasons, at most; then the run ends."""
    max_rollbacks: PositiveInt = 3
    """Of the whole run; then it ends."""
    find_nan: bool = False
    """Make a step with a NaN or Inf once more, looking for where the first one comes from."""


class DataConfig(Section):
    """What the run reads."""

    paths: list[str] = Field(min_length=1)
    """Prefixes written by `megagrid data prepare`; or made-up tokens: "synthetic", without end, or
    "synthetic:N", N samples."""
    weights: list[NonNegativeFloat] | None = None
    """Share of samples drawn from each path; None: by their size."""
    valid_fraction: BelowOne = 0.01
    """Share of documents held out for evaluation."""
    repeat: bool = True
    """Start a new epoch when the documents run out; false: the run ends with the data."""
    document_mask: bool = False
    """Tokens see those of their own document alone, not all that a sample is filled with."""
    reset_positions: bool | None = None
    """Positions count from the beginning of a document; None: if document_mask does."""
    mask_token_ids: list[NonNegativeInt] = []
    """Ids that are read but not learnt, such as padding: labels of them count nowhere."""
    cache_dir: str | None = None
    """Where index caches lie; None: beside each prefix."""
    prefetch: NonNegativeInt = 2
    """Steps of batches that a background thread reads ahead."""

    @property
    def resets_positions(self) -> bool:
        """Whether positions are those in a document, not in a sample."""
        return self.document_mask if self.reset_positions is None else self.reset_positions

    @property
    def is_synthetic(self) -> bool:
        """Whether any of the paths stands for made-up tokens."""
        return any(path.partition(":")[0] == "synthetic" for path in self.paths)


class EvaluationConfig(Section):
    """Validation in the loop, forward only, through the same pipeline."""

    interval: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end, if there is a validation split."""
    batches: PositiveInt = 4
    """Global batches of one evaluation, at most; the same samples each time."""


class CheckpointConfig(Section):
    """When the run is saved, and what it starts from."""

    save_interval: NonNegativeInt = 0
    """Steps between saves; 0: only at the end."""
    save_at_end: bool = True
    async_save: bool | None = None
    """Write behind the training, from copies in host memory; true on a cpu doubles what weights and
    optimizer states take there. None: where the device has memory of its own."""
    on_failed_save: Literal["end", "continue"] = "end"
    """What becomes of a run whose disk is full or fails while it saves. The former checkpoint stays
    either way, and if the last save of a run fails it ends with an error."""
    seconds_to_stop: PositiveInt = 600
    """Longest that ranks may take to end their step and save it, once SIGTERM or SIGUSR1 has asked
    them to stop; then the launcher kills them."""
    keep_last: NonNegativeInt = 0
    """Newest checkpoints that are kept; 0: all."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of multiples of so many steps are kept, however old; 0: those of keep_last."""
    read_by: Literal["every_rank", "first_rank"] = "every_rank"
    """Who reads a checkpoint: every rank the slices that it holds, or the first rank all of it, and
    sends it to the others: for a shared disk that many readers slow down."""
    resume: str | None = None
    """A checkpoint's folder, a run's folder, or "latest": of run_dir, afresh if it has none."""
    initialize_from: str | None = None
    """Weights to begin with at step 0, where nothing is resumed: a Hugging Face model's folder, a
    checkpoint's or a run's."""
    export_hf: str | None = None
    """A new folder for the last weights in Hugging Face's layout, written after the last step."""
    export_hf_dtype: ExportDtype = "fp32"
    """Of those weights."""


class LoggingConfig(Section):
    """Where the run writes, and what it says."""

    run_dir: str
    interval: PositiveInt = 1
    """Steps between lines on the console; metrics.jsonl has every step."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s, for MFU and HFU; None: by the device's name, if known."""
    beat_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds between a rank's beats: what it writes of itself to RUN/ranks, see
    `megagrid.health.beat`. A tenth of train.timeout_seconds at most."""
    straggler_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.5
    """A rank is called slow that computes for so many times the median of ranks with its stage."""
    trace_interval: NonNegativeInt = 0
    """Steps between steps whose pipeline actions are timed, for `megagrid report`; 0: none."""
    digest_interval: NonNegativeInt = 0
    """Steps between steps that are digested for `megagrid compare`, from the first on; 0: none."""
    wandb: Literal["online", "offline", "off"] = "off"
    wandb_project: str = "megagrid"
    wandb_name: str | None = None


class Config(Section):
    """A whole run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig
