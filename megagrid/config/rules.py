"""Rules that tie keys together, each checked once, before ranks start.

A rule is a function that returns nothing, or raises a ConfigError that names the keys, their values
and what would work. `RULES` is the list; a new rule is a new function and a new row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from megagrid.config import suggest
from megagrid.config.dump import toml_value
from megagrid.config.modules import end_modules, is_unsharded, layer_modules, matches
from megagrid.config.schema import Config, ModelConfig
from megagrid.config.sharding import STRATEGIES, Sharding
from megagrid.errors import ConfigError
from megagrid.grid.placement import Placement

DEVICES = ("cpu", "cuda", "hpu", "mlu", "mps", "mtia", "musa", "npu", "xpu")
"""Types that torch has, or gets from a package of their makers."""

NO_FP64_DEVICES = ("mps",)

LLAMA_KEYS = {"qkv_bias": False, "qk_norm": False, "rope_scaling": "none"}
"""Keys that a gpt has no use for, and their value there."""

ROPE_SCALING_KEYS = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "llama3": (
        "rope_scaling_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_max_seq_length",
    ),
}
ROPE_SCALING_KEYS["yarn"] = ROPE_SCALING_KEYS["llama3"]
"""What each kind of RoPE scaling is made of."""

ROPE_SCALING_OPTIONS = {"yarn": ("rope_attention_factor",)}
"""What may be stated beside it."""

PUT_OFF_WEIGHTS = ("ZB1P", "ZBV")
"""Schedules that put the gradients of weights off."""

ADAMW_KEYS, MOMENTUM_KEYS = ("beta1", "beta2", "eps"), ("momentum", "nesterov")
MUON_KEYS = ("adamw_lr", "muon_scale", "muon_steps", "muon_dtype")
OPTIMIZER_KEYS = {
    "adamw": ADAMW_KEYS,
    "sgd": MOMENTUM_KEYS,
    "muon": (*ADAMW_KEYS, *MOMENTUM_KEYS, *MUON_KEYS),
}
"""Keys that not every optimizer reads."""

LARGEST_ROUNDED_BETA = 1 - 2**-8
"""Of moments in bf16, whose last bit is worth up to 2^-7 of them."""

LARGEST_CHOICE = 4096
"""Divisors above it are of no use to anyone, and would take long to find for a mistyped number."""

MOST_FORWARDS = 100_000
"""Of all stages in a step: it takes seconds to write down and to verify what is done in them."""


def check(config: Config, world_size: int | None = None) -> None:
    """Hold `config` against every rule.

    Args:
        world_size: ranks that will run it. Without it and without parallel.data_parallel_size,
            rules about the dp axis are left for later.

    Raises:
        ConfigError: the first rule that is broken.
        GridError: the grid doesn't have `world_size` ranks.
    """
    if world_size is not None:
        config = _with_data_parallel_size(config, world_size)
    for rule in RULES:
        rule(config)


def placement(config: Config, world_size: int | None = None) -> Placement:
    """The grid of the run.

    Args:
        world_size: ranks that there are; None: as few as the recipe allows, dp 1 unless stated.

    Raises:
        GridError: the stated sizes don't make `world_size` ranks.
    """
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
    )
    if world_size is None:
        return Placement(tp=tp, pp=pp, cp=cp, dp=parallel.data_parallel_size or 1)
    return Placement.for_world(world_size, tp=tp, pp=pp, cp=cp, dp=parallel.data_parallel_size)


def _with_data_parallel_size(config: Config, world_size: int) -> Config:
    dp = placement(config, world_size).dp
    parallel = config.parallel.model_copy(update={"data_parallel_size": dp})
    return config.model_copy(update={"parallel": parallel})


# --- Model ---------------------------------------------------------------------------------------


def kv_heads_divide_heads(config: Config) -> None:
    """Each key/value head serves the same number of heads."""
    model = config.model
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads="
            f"{model.num_heads}; choose {_choice(_divisors(model.num_heads))}"
        )


def rope_needs_even_head_dim(config: Config) -> None:
    """RoPE turns pairs of channels."""
    model = config.model
    if model.family == "llama" and model.head_dim % 2:
        raise ConfigError(
            f"model.head_dim={model.head_dim} must be even for RoPE; choose {model.head_dim + 1}, "
            'or model.family="gpt"'
        )


def dropout_is_for_gpt(config: Config) -> None:
    """A rate that nothing reads would look like regularisation."""
    model = config.model
    for key in ("dropout", "attention_dropout"):
        if model.family != "gpt" and (rate := getattr(model, key)):
            raise ConfigError(
                f'model.{key}={rate} has no place in model.family="{model.family}"; set it to 0, '
                'or model.family="gpt"'
            )


def gpt_has_no_keys_of_llama(config: Config) -> None:
    """A gpt has biases everywhere, and positions that nothing rotates."""
    model = config.model
    for key, off in LLAMA_KEYS.items():
        if model.family == "gpt" and (value := getattr(model, key)) != off:
            raise ConfigError(
                f'model.{key}={toml_value(value)} has no place in model.family="gpt"; set it to '
                f'{toml_value(off)}, or model.family="llama"'
            )


def rope_scaling_is_stated_whole(config: Config) -> None:
    """Each kind has its numbers, all of them, and no other's."""
    model = config.model
    needed = ROPE_SCALING_KEYS[model.rope_scaling]
    allowed = (*needed, *ROPE_SCALING_OPTIONS.get(model.rope_scaling, ()))
    every = (*ROPE_SCALING_KEYS["yarn"], *ROPE_SCALING_OPTIONS["yarn"])
    stated = [key for key in every if getattr(model, key) is not None]
    kind = f'model.rope_scaling="{model.rope_scaling}"'
    if missing := [f"model.{key}" for key in needed if key not in stated]:
        raise ConfigError(f'{kind} needs {", ".join(missing)}; state it, or set it to "none"')
    if extra := [key for key in stated if key not in allowed]:
        raise ConfigError(
            f"model.{extra[0]}={getattr(model, extra[0])} isn't read under {kind}; clear it with "
            f"none, or choose another rope_scaling"
        )
    if "rope_high_freq_factor" in needed:
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        if low >= high:
            raise ConfigError(
                f"model.rope_low_freq_factor={low} must be below model.rope_high_freq_factor="
                f"{high}; Llama 3.1 has 1 and 4, YaRN 1 and 32"
            )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        raise ConfigError(
            f"model.rope_theta={model.rope_theta} must be above 1 under {kind}; choose 10000"
        )


# --- Tensor and sequence parallelism -------------------------------------------------------------


def tensor_parallel_splits_the_layer(config: Config) -> None:
    """tp ranks share heads, MLP columns and key/value heads evenly.

    With more ranks than key/value heads, tp / num_kv_heads ranks hold a copy of the same one.
    """
    model, tp = config.model, config.parallel.tensor_parallel_size
    choices = f"choose {_choice(_tensor_parallel_sizes(model))}"
    for key in ("num_heads", "ffn_hidden_size"):
        if getattr(model, key) % tp:
            raise ConfigError(
                f"parallel.tensor_parallel_size={tp} must divide model.{key}="
                f"{getattr(model, key)}; {choices}"
            )
    if not _divide(tp, model.num_kv_heads):
        raise ConfigError(
            f"parallel.tensor_parallel_size={tp} must divide model.num_kv_heads="
            f"{model.num_kv_heads} or be a multiple of it; {choices}"
        )


def sequence_parallel_splits_the_sequence(config: Config) -> None:
    """Each tp rank holds the same number of positions: the shards are exchanged whole."""
    seq, tp = config.train.seq_length, config.parallel.tensor_parallel_size
    if config.parallel.sequence_parallel and seq % tp:
        raise ConfigError(
            f"train.seq_length={seq} must be a multiple of parallel.tensor_parallel_size={tp} "
            f"under parallel.sequence_parallel=true; choose {_choice(_multiples_near(seq, tp))}, "
            "or set it to false"
        )


def context_parallel_splits_the_sequence(config: Config) -> None:
    """Each cp rank has two chunks of a sample, whose length is the same for all; under sequence
    parallelism its tp ranks share those out."""
    seq, parallel = config.train.seq_length, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    shares = tp if parallel.sequence_parallel else 1
    unit = cp * math.lcm(2, shares)
    if cp > 1 and seq % unit:
        under = f" and parallel.tensor_parallel_size={tp}" if shares > 1 else ""
        longest = config.model.max_seq_length
        lengths = [length for length in _multiples_near(seq, unit) if length <= longest]
        raise ConfigError(
            f"train.seq_length={seq} must be a multiple of {unit} for parallel."
            f"context_parallel_size={cp}{under}; choose "
            + (f"{_choice(lengths)}, or " if lengths else "")
            + "a smaller context_parallel_size"
        )


def ulysses_splits_the_heads(config: Config) -> None:
    """Each cp rank gets as many of its tp rank's heads; key/value heads are shared out as evenly,
    or several ranks get the same one."""
    model, parallel = config.model, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    if cp == 1 or parallel.context_parallel != "ulysses":
        return

    def fits(size: int) -> bool:
        of_tp_rank = max(1, model.num_kv_heads // tp)
        return model.num_heads % (tp * size) == 0 and _divide(size, of_tp_rank)

    if not fits(cp):
        others = [size for size in _divisors(model.num_heads // tp) if fits(size)]
        raise ConfigError(
            f'parallel.context_parallel_size={cp} under parallel.context_parallel="ulysses" must '
            f"share out model.num_heads={model.num_heads} and model.num_kv_heads="
            f"{model.num_kv_heads} of parallel.tensor_parallel_size={tp} evenly; choose "
            f'{_choice(others)}, or parallel.context_parallel="all_gather" or "ring"'
        )


def ring_keeps_all_probabilities(config: Config) -> None:
    """A ring's parts of a softmax are put together by their sums, which dropout isn't part of."""
    model, parallel = config.model, config.parallel
    is_ring = parallel.context_parallel_size > 1 and parallel.context_parallel == "ring"
    if is_ring and model.attention_dropout:
        raise ConfigError(
            f"model.attention_dropout={model.attention_dropout} isn't computed by "
            'parallel.context_parallel="ring"; choose "all_gather" or "ulysses", or set it to 0'
        )


def positions_reach_the_sequence(config: Config) -> None:
    """Learned positions end there; RoPE was meant for no more."""
    seq, longest = config.train.seq_length, config.model.max_seq_length
    if seq > longest:
        raise ConfigError(
            f"train.seq_length={seq} is longer than model.max_seq_length={longest}; choose at most "
            f"{longest}, or raise model.max_seq_length"
        )


# --- Pipeline ------------------------------------------------------------------------------------


def schedule_fits_the_chunks(config: Config) -> None:
    """Interleaved1F1B takes two or more chunks a rank, ZBV two, the others one."""
    schedule, chunks = config.parallel.pipeline_schedule, config.parallel.virtual_pipeline_size
    if config.parallel.pipeline_schedule_file is not None:
        return
    if schedule == "Interleaved1F1B":
        if chunks < 2:
            raise ConfigError(
                f"parallel.virtual_pipeline_size={chunks} leaves "
                'parallel.pipeline_schedule="Interleaved1F1B" nothing to interleave; choose 2 or '
                'more, or parallel.pipeline_schedule="1F1B"'
            )
        return
    needed = 2 if schedule == "ZBV" else 1
    if chunks != needed:
        raise ConfigError(
            f"parallel.virtual_pipeline_size={chunks} doesn't fit parallel.pipeline_schedule="
            f'"{schedule}", which has {needed} a rank; choose {needed}, or '
            'parallel.pipeline_schedule="Interleaved1F1B"'
        )


def every_stage_has_layers(config: Config) -> None:
    """Without `layers_per_stage`: whoever wants an empty stage says so there."""
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.layers_per_stage is None and parallel.num_stages > layers:
        chunks = parallel.virtual_pipeline_size
        raise ConfigError(
            f"parallel.pipeline_parallel_size={parallel.pipeline_parallel_size}{_times(chunks)} "
            f"makes {parallel.num_stages} stages for model.num_layers={layers}; choose at most "
            f"{max(1, layers // chunks)} ranks, or state parallel.layers_per_stage with zeros"
        )


def layers_per_stage_adds_up(config: Config) -> None:
    """One entry a stage, zeros included, and no layer lost or invented."""
    parallel, layers = config.parallel, config.model.num_layers
    stated = parallel.layers_per_stage
    if stated is None:
        return
    if len(stated) != parallel.num_stages:
        raise ConfigError(
            f"parallel.layers_per_stage={toml_value(stated)} has {len(stated)} entries for "
            f"parallel.pipeline_parallel_size={parallel.pipeline_parallel_size}"
            f"{_times(parallel.virtual_pipeline_size)} = {parallel.num_stages} stages; state one "
            "for each"
        )
    if sum(stated) != layers:
        raise ConfigError(
            f"parallel.layers_per_stage={toml_value(stated)} adds up to {sum(stated)}, not "
            f"model.num_layers={layers}; {_more_or_fewer(layers - sum(stated))}"
        )


# --- Sharding ------------------------------------------------------------------------------------


def shard_size_is_of_hybrid_shard(config: Config) -> None:
    """The others split over all ranks that there are, or over none."""
    parallel = config.parallel
    if parallel.shard_size is not None and parallel.sharding_strategy != "HYBRID_SHARD":
        raise ConfigError(
            f"parallel.shard_size={parallel.shard_size} isn't read under "
            f'parallel.sharding_strategy="{parallel.sharding_strategy}"; clear it with none, or '
            'choose "HYBRID_SHARD"'
        )


def shard_size_divides_the_ranks(config: Config) -> None:
    """The ranks with the same parameters fall into groups of it."""
    parallel = config.parallel
    size, dp, cp = parallel.shard_size, parallel.data_parallel_size, parallel.context_parallel_size
    if size is not None and dp is not None and dp * cp % size:
        times = f" x parallel.context_parallel_size={cp} = {dp * cp}" if cp > 1 else ""
        raise ConfigError(
            f"parallel.shard_size={size} must divide parallel.data_parallel_size={dp}{times}; "
            f"choose {_choice(_divisors(dp * cp))}"
        )


def gathered_weights_are_kept_or_dropped(config: Config) -> None:
    """The two keys about them agree with each other and with the strategy."""
    parallel = config.parallel
    after, hold, name = (
        parallel.reshard_after_forward,
        parallel.hold_for_step,
        parallel.sharding_strategy,
    )
    stated = {"reshard_after_forward": after, "hold_for_step": hold}
    for key, value in stated.items():
        if value is not None and not STRATEGIES[name].shards:
            raise ConfigError(
                f"parallel.{key}={toml_value(value)} has nothing to act on: under "
                f'parallel.sharding_strategy="{name}" every rank has whole parameters; clear it '
                'with none, or choose "FULL_SHARD"'
            )
    if hold and after not in (None, False):
        raise ConfigError(
            f"parallel.hold_for_step=true keeps what parallel.reshard_after_forward="
            f"{toml_value(after)} lets go of; set one of them to false"
        )
    if name == "SHARD_GRAD_OP" and (hold is False or after not in (None, False)):
        key = "hold_for_step" if hold is False else "reshard_after_forward"
        raise ConfigError(
            f"parallel.{key}={toml_value(stated[key])} contradicts "
            'parallel.sharding_strategy="SHARD_GRAD_OP", which keeps parameters gathered for a '
            'step; choose "FULL_SHARD"'
        )


def reshard_size_divides_the_shards(config: Config) -> None:
    """An integer parallel.reshard_after_forward lies between one rank and all that split."""
    parallel = config.parallel
    size, dp = parallel.reshard_after_forward, parallel.data_parallel_size
    if size is None or isinstance(size, bool) or dp is None:
        return
    split = Sharding.of(config, placement(config)).split
    sizes = _divisors(split)[1:-1]
    if size not in sizes:
        others = "true (let go of) or false (kept)"
        raise ConfigError(
            f"parallel.reshard_after_forward={size} must divide the {split} ranks that split a "
            "parameter, and be neither 1 nor all; choose "
            + (f"{', '.join(map(str, sizes))}, {others}" if sizes else others)
        )


def units_are_smaller_than_the_model(config: Config) -> None:
    """Everything in one unit would be gathered whole, and nothing saved."""
    blocks, layers = config.parallel.blocks_per_unit, config.model.num_layers
    if blocks > layers:
        raise ConfigError(
            f"parallel.blocks_per_unit={blocks} is more than model.num_layers={layers}; choose at "
            f"most {layers}"
        )


def tied_table_stays_in_its_stage(config: Config) -> None:
    """A table that is embedding and head of one stage is needed from its begin to its end."""
    model, parallel = config.model, config.parallel
    for key in ("wrap_embedding", "wrap_head"):
        if getattr(parallel, key) and model.tied_embeddings and parallel.num_stages == 1:
            raise ConfigError(
                f"parallel.{key}=true has nothing to act on: under model.tied_embeddings=true the "
                "one stage needs the table from begin to end; set it to false, or make two or more "
                "stages"
            )


def unsharded_modules_exist(config: Config) -> None:
    """Each pattern names some of the model's modules, and together they leave something to split.

    A name that is nowhere would silently be sharded.
    """
    model, parallel = config.model, config.parallel
    patterns, name = parallel.unsharded_modules, parallel.sharding_strategy
    if not patterns:
        return
    if not STRATEGIES[name].shards:
        raise ConfigError(
            f"parallel.unsharded_modules={toml_value(patterns)} has nothing to act on under "
            f'parallel.sharding_strategy="{name}"; clear it with [], or choose "FULL_SHARD"'
        )
    of_layer = list(layer_modules(model))
    modules = [*end_modules(model)]
    modules += [f"layers.{n}.{module}" for n in range(model.num_layers) for module in of_layer]
    for index, pattern in enumerate(patterns):
        if not any(matches(module, [pattern]) for module in modules):
            known = [*end_modules(model), *(f"layers.*.{module}" for module in of_layer)]
            near = suggest.closest(re.sub(r"\d+", "*", pattern), known)
            last = model.num_layers - 1
            layer = re.match(r"layers\.(\d+)\b", pattern)
            if layer and int(layer[1]) > last:
                raise ConfigError(
                    f"parallel.unsharded_modules[{index}]={toml_value(pattern)} names no module: "
                    f"layers end at {last} with model.num_layers={model.num_layers}"
                )
            raise ConfigError(
                f"parallel.unsharded_modules[{index}]={toml_value(pattern)} names no module; "
                + (f"did you mean {toml_value(near)}? " if near else "")
                + f"there are {', '.join(known)}"
            )
    if all(is_unsharded(module, model, patterns) for module in modules):
        raise ConfigError(
            f"parallel.unsharded_modules={toml_value(patterns)} leaves nothing to shard; name "
            'fewer, or choose parallel.sharding_strategy="NO_SHARD"'
        )


# --- Batch and length of the run -----------------------------------------------------------------


def batch_is_whole_microbatches(config: Config) -> None:
    """Every dp rank runs the same number, at least one, of microbatches of one size."""
    train, dp = config.train, config.parallel.data_parallel_size
    unit = train.micro_batch_size * (dp or 1)
    if train.global_batch_size % unit:
        product = f" x parallel.data_parallel_size={dp} = {unit}" if dp else ""
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} must be a multiple of "
            f"train.micro_batch_size={train.micro_batch_size}{product}; choose "
            f"{_choice(_multiples_near(train.global_batch_size, unit))}"
        )


def schedule_can_be_written_down(config: Config) -> None:
    """A schedule is a list of all that a step does. A longer one is a typing error, and would fill
    memory and time before the first step."""
    train, parallel = config.train, config.parallel
    microbatches = train.global_batch_size // (
        train.micro_batch_size * (parallel.data_parallel_size or 1)
    )
    forwards = microbatches * parallel.num_stages
    if forwards > MOST_FORWARDS:
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} with train.micro_batch_size="
            f"{train.micro_batch_size} makes {microbatches} microbatches, for {parallel.num_stages}"
            f" pipeline stages {forwards} forwards a step and more than {MOST_FORWARDS}; raise "
            "train.micro_batch_size or parallel.data_parallel_size"
        )


def run_has_one_length(config: Config) -> None:
    """Stated in steps or in tokens: with both, one of them would be ignored."""
    steps, tokens = config.train.steps, config.train.tokens
    if steps is None and tokens is None:
        raise ConfigError("neither train.steps nor train.tokens is stated; state one of them")
    if steps is not None and tokens is not None:
        raise ConfigError(
            f"train.steps={steps} and train.tokens={tokens} both set the run's length; keep one, "
            "or clear one with train.steps=none"
        )


def final_decay_fits_the_run(config: Config) -> None:
    """wsd ends with its decay; one that is longer than the run would start before it."""
    schedule, steps = config.lr_schedule, config.train.total_steps
    if schedule.kind == "wsd" and (schedule.decay_steps or 0) > steps:
        raise ConfigError(
            f"lr_schedule.decay_steps={schedule.decay_steps} is longer than the run, whose last "
            f'step is {steps}, under lr_schedule.kind="wsd"; choose at most {steps}'
        )


def width_scaling_is_adams(config: Config) -> None:
    """muP scales learning rates as Adam needs it, from the base width on."""
    model, optimizer = config.model, config.optimizer
    width, head_dim = model.mup_base_width, model.mup_base_head_dim
    if width is None and head_dim is not None:
        raise ConfigError(
            f"model.mup_base_head_dim={head_dim} isn't read without model.mup_base_width; state "
            "that too, or leave it out"
        )
    if width is not None and optimizer.name != "adamw":
        raise ConfigError(
            f"model.mup_base_width={width} scales learning rates for Adam, not for "
            f'optimizer.name="{optimizer.name}"; choose "adamw", or leave it out'
        )


def optimizer_reads_its_keys(config: Config) -> None:
    """A key of another optimizer, stated, would look as if it were in use."""
    optimizer = config.optimizer
    read = OPTIMIZER_KEYS[optimizer.name]
    for key, field in type(optimizer).model_fields.items():
        value = getattr(optimizer, key)
        readers = [name for name, keys in OPTIMIZER_KEYS.items() if key in keys]
        if readers and key not in read and value != field.default:
            raise ConfigError(
                f"optimizer.{key}={toml_value(value)} isn't read by optimizer.name="
                f'"{optimizer.name}"; leave it out, or choose {_choice(map(toml_value, readers))}'
            )


def device_computes_the_precision(config: Config) -> None:
    """A device type, without an index, that has the arithmetic asked for."""
    train = config.train
    if not re.fullmatch(r"[a-z]+", train.device):
        raise ConfigError(
            f'train.device={toml_value(train.device)} must be "auto" or a device type, such as '
            '"cpu" or "cuda"; each rank takes the index of its own'
        )
    if train.device not in ("auto", *DEVICES):
        raise ConfigError(
            f'train.device="{train.device}" isn\'t a device type of torch; choose "auto", '
            f"{_choice(map(toml_value, DEVICES))}"
        )
    if train.precision == "fp64" and train.device in NO_FP64_DEVICES:
        raise ConfigError(
            f'train.precision="fp64" isn\'t computed by train.device="{train.device}"; choose '
            '"fp32" or "bf16", or train.device="cpu"'
        )


# --- Memory --------------------------------------------------------------------------------------


def recompute_interval_is_of_whole_layers(config: Config) -> None:
    """The other kinds recompute the same in every layer."""
    memory = config.memory
    if memory.recompute_interval > 1 and memory.recompute != "full":
        raise ConfigError(
            f"memory.recompute_interval={memory.recompute_interval} isn't read under "
            f'memory.recompute="{memory.recompute}"; choose 1, or memory.recompute="full"'
        )
    if memory.recompute_interval > (layers := config.model.num_layers):
        raise ConfigError(
            f"memory.recompute_interval={memory.recompute_interval} is more than "
            f"model.num_layers={layers}; choose at most {layers}"
        )


def moments_can_be_rounded(config: Config) -> None:
    """bf16 has eight bits: a moment that moves by less than half of its last one stays where it is,
    and one whose gradient has become 0 moves by 1 - beta of itself."""
    optimizer = config.optimizer
    if optimizer.state_dtype == "fp32":
        return
    if optimizer.name != "adamw":
        raise ConfigError(
            f'optimizer.state_dtype="bf16" isn\'t read under optimizer.name="{optimizer.name}"; '
            'choose "fp32", or optimizer.name="adamw"'
        )
    for key in ("beta1", "beta2"):
        if (beta := getattr(optimizer, key)) > LARGEST_ROUNDED_BETA:
            raise ConfigError(
                f'optimizer.{key}={beta} moves a moment by less than optimizer.state_dtype="bf16" '
                f'can hold; choose at most {LARGEST_ROUNDED_BETA}, or state_dtype="fp32"'
            )


def float8_is_for_bf16(config: Config) -> None:
    """What isn't multiplied in float8 is in bf16; and the products make their gradients at once."""
    mode, precision = config.train.float8, config.train.precision
    if mode == "off":
        return
    if precision != "bf16":
        raise ConfigError(
            f'train.float8="{mode}" goes with train.precision="bf16", not "{precision}"; choose '
            'that, or train.float8="off"'
        )
    schedule = config.parallel.pipeline_schedule
    if schedule in PUT_OFF_WEIGHTS:
        raise ConfigError(
            f'train.float8="{mode}" computes weight gradients at once, which '
            f'parallel.pipeline_schedule="{schedule}" would put off; choose "1F1B" or '
            '"Interleaved1F1B"'
        )


def float8_multiplies_sixteens(config: Config) -> None:
    """Devices multiply float8 matrices whose sides are multiples of 16."""
    if config.train.float8 != "on":
        return
    model, train, tp = config.model, config.train, config.parallel.tensor_parallel_size
    sides = {
        f"model.hidden_size={model.hidden_size}": model.hidden_size,
        f"model.ffn_hidden_size={model.ffn_hidden_size} by tp {tp}": model.ffn_hidden_size // tp,
        f"model.num_heads={model.num_heads} x model.head_dim={model.head_dim} by tp {tp}": (
            model.num_heads * model.head_dim // tp
        ),
        f"train.micro_batch_size={train.micro_batch_size} x train.seq_length={train.seq_length}": (
            train.micro_batch_size * train.seq_length
        ),
    }
    for name, side in sides.items():
        if side % 16:
            raise ConfigError(
                'train.float8="on" multiplies matrices whose sides are multiples of 16, and '
                f"{name} makes {side}; choose {_choice(_multiples_near(side, 16))}, or "
                'train.float8="off"'
            )


def loss_scale_begins_above_its_least(config: Config) -> None:
    """It falls from where it begins."""
    scale = config.loss_scale
    if scale.min > scale.initial:
        raise ConfigError(
            f"loss_scale.min={scale.min} is above loss_scale.initial={scale.initial}; choose at "
            f"most {scale.initial}"
        )


def rollback_has_checkpoints(config: Config) -> None:
    """What a run is rolled back to is a checkpoint of its own."""
    guard, interval, steps = config.guard, config.checkpoint.save_interval, config.train.total_steps
    if 0 < interval < steps:
        return
    for key in ("on_nan", "on_spike"):
        if getattr(guard, key) == "rollback":
            of_run = f" in a run of {steps} steps" if interval else ""
            raise ConfigError(
                f'guard.{key}="rollback" needs checkpoints on the way, and '
                f"checkpoint.save_interval={interval} saves none{of_run}; state the steps between "
                f'them, or choose guard.{key}="skip"'
            )


def compiled_blocks_choose_what_they_keep(config: Config) -> None:
    """A compiler that may recompute some of a block recomputes more of it than that."""
    kind = config.memory.recompute
    if config.train.compile and kind == "selective":
        raise ConfigError(
            'memory.recompute="selective" doesn\'t go with train.compile=true, where the compiler '
            'chooses what is computed again; choose "none", which leaves it to it, or "full"'
        )


def compiled_blocks_are_whole_and_alone(config: Config) -> None:
    """What reaches into a block, or waits for others in its midst, isn't traced as one graph."""
    cp, schedule = config.parallel.context_parallel_size, config.parallel.pipeline_schedule
    is_of_file = config.parallel.pipeline_schedule_file is not None
    puts_off = schedule in PUT_OFF_WEIGHTS and not is_of_file
    for key, is_asked_for, remedy in (
        (f"parallel.context_parallel_size={cp}", cp > 1, "1"),
        ("data.document_mask=true", config.data.document_mask, "false"),
        ("memory.activation_offload=true", config.memory.activation_offload, "false"),
        (f'parallel.pipeline_schedule="{schedule}"', puts_off, '"1F1B" or "Interleaved1F1B"'),
    ):
        if config.train.compile and is_asked_for:
            raise ConfigError(
                f"{key} doesn't go with train.compile=true; set it to {remedy}, or "
                "train.compile=false"
            )


def guard_fills_its_window(config: Config) -> None:
    """Until it has seen as many steps, it takes none for a spike."""
    guard, steps = config.guard, config.train.total_steps
    if guard.on_spike != "off" and guard.window >= steps:
        raise ConfigError(
            f'guard.on_spike="{guard.on_spike}" would never act: guard.window={guard.window} steps '
            f"come before it, and the run has {steps}; "
            + (f"choose a window below {steps}" if steps > 2 else 'choose on_spike="off"')
        )


# --- Data and files ------------------------------------------------------------------------------


def weights_blend_the_paths(config: Config) -> None:
    """One share for each path, and not all of them zero."""
    paths, weights = config.data.paths, config.data.weights
    if weights is None:
        return
    if len(weights) != len(paths):
        raise ConfigError(
            f"data.weights={toml_value(weights)} has {len(weights)} entries for {len(paths)} "
            "data.paths; state one for each"
        )
    if not sum(weights) > 0:
        raise ConfigError(
            f"data.weights={toml_value(weights)} draws from none of the data.paths; make one "
            "larger than 0"
        )


def masked_ids_are_in_the_vocabulary(config: Config) -> None:
    """An id beyond it is a typing error: no label could be it."""
    size, ids = config.model.vocab_size, config.data.mask_token_ids
    if ids and max(ids) >= size:
        raise ConfigError(
            f"data.mask_token_ids={toml_value(ids)} has {max(ids)}, and model.vocab_size={size} "
            f"ends before it; choose ids below {size}"
        )


def paths_are_distinct(config: Config) -> None:
    """The same documents twice would be drawn twice as often, unseen."""
    for index, path in enumerate(config.data.paths):
        if not path:
            raise ConfigError(f'data.paths[{index}]="" is empty; write a prefix or "synthetic"')
        if path in config.data.paths[:index]:
            raise ConfigError(
                f"data.paths names {toml_value(path)} twice; keep one, and give it more of "
                "data.weights"
            )


def synthetic_stands_alone(config: Config) -> None:
    """Made-up tokens have no size to blend by, and no tokenizer to agree with."""
    paths = config.data.paths
    is_one_source = len(paths) == 1 and re.fullmatch(r"synthetic(:0*[1-9]\d*)?", paths[0])
    if config.data.is_synthetic and not is_one_source:
        raise ConfigError(
            f'data.paths={toml_value(paths)}: made-up tokens are one path alone, "synthetic" or '
            '"synthetic:N" for N samples'
        )


def documents_are_of_files(config: Config) -> None:
    """Made-up tokens are one document without end."""
    data = config.data
    for key in ("document_mask", "reset_positions"):
        if getattr(data, key) and data.is_synthetic:
            raise ConfigError(
                f"data.{key}=true has nothing to act on: data.paths={toml_value(data.paths)} has "
                "no documents; set it to false, or name files of `megagrid data prepare`"
            )


def evaluation_has_documents(config: Config) -> None:
    """An evaluation that is asked for needs documents that training leaves out."""
    interval, fraction = config.evaluation.interval, config.data.valid_fraction
    if interval and not fraction:
        raise ConfigError(
            f"evaluation.interval={interval} has nothing to evaluate on with data.valid_fraction="
            f"{fraction}; make it larger than 0, or evaluation.interval=0"
        )


def kept_checkpoints_are_saved_ones(config: Config) -> None:
    """What is kept of old checkpoints is so because of its step, and others go."""
    settings = config.checkpoint
    every, interval = settings.keep_every, settings.save_interval
    if every and not settings.keep_last:
        raise ConfigError(
            f"checkpoint.keep_every={every} keeps nothing that checkpoint.keep_last=0 doesn't keep "
            "anyway; choose keep_last=1 or more, or keep_every=0"
        )
    if every and interval and every % interval:
        raise ConfigError(
            f"checkpoint.keep_every={every} must be a multiple of checkpoint.save_interval="
            f"{interval}; choose {_choice(_multiples_near(every, interval))}"
        )


def export_needs_a_last_checkpoint(config: Config) -> None:
    """The exported folder is made of it."""
    settings = config.checkpoint
    if settings.export_hf is not None and not settings.save_at_end:
        raise ConfigError(
            f"checkpoint.export_hf={toml_value(settings.export_hf)} needs the checkpoint of the "
            "last step; set checkpoint.save_at_end=true"
        )


def run_has_a_folder(config: Config) -> None:
    """Everything that the run writes lies below one folder."""
    if not config.logging.run_dir.strip():
        raise ConfigError('logging.run_dir="" names no folder; write one, e.g. "runs/first"')


RULES: tuple[Callable[[Config], None], ...] = (
    kv_heads_divide_heads,
    rope_needs_even_head_dim,
    dropout_is_for_gpt,
    gpt_has_no_keys_of_llama,
    rope_scaling_is_stated_whole,
    tensor_parallel_splits_the_layer,
    context_parallel_splits_the_sequence,
    ulysses_splits_the_heads,
    ring_keeps_all_probabilities,
    positions_reach_the_sequence,
    sequence_parallel_splits_the_sequence,
    schedule_fits_the_chunks,
    every_stage_has_layers,
    layers_per_stage_adds_up,
    shard_size_is_of_hybrid_shard,
    shard_size_divides_the_ranks,
    gathered_weights_are_kept_or_dropped,
    reshard_size_divides_the_shards,
    units_are_smaller_than_the_model,
    tied_table_stays_in_its_stage,
    unsharded_modules_exist,
    batch_is_whole_microbatches,
    schedule_can_be_written_down,
    run_has_one_length,
    final_decay_fits_the_run,
    width_scaling_is_adams,
    optimizer_reads_its_keys,
    device_computes_the_precision,
    compiled_blocks_choose_what_they_keep,
    compiled_blocks_are_whole_and_alone,
    recompute_interval_is_of_whole_layers,
    moments_can_be_rounded,
    float8_is_for_bf16,
    float8_multiplies_sixteens,
    loss_scale_begins_above_its_least,
    rollback_has_checkpoints,
    guard_fills_its_window,
    weights_blend_the_paths,
    masked_ids_are_in_the_vocabulary,
    paths_are_distinct,
    synthetic_stands_alone,
    documents_are_of_files,
    evaluation_has_documents,
    export_needs_a_last_checkpoint,
    kept_checkpoints_are_saved_ones,
    run_has_a_folder,
)


# --- What would work -----------------------------------------------------------------------------


def _divide(a: int, b: int) -> bool:
    """Whether one of them divides the other."""
    return a % b == 0 or b % a == 0


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, LARGEST_CHOICE) + 1) if number % d == 0]


def _tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """Every tp that splits the model's layers."""
    return [
        tp
        for tp in _divisors(model.num_heads)
        if model.ffn_hidden_size % tp == 0 and _divide(tp, model.num_kv_heads)
    ]


def _multiples_near(number: int, unit: int) -> list[int]:
    """The multiples of `unit` on either side of `number`."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def _choice(values: Iterable[object]) -> str:
    """For example: 1, 2 or 4."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _times(chunks: int) -> str:
    return f" x parallel.virtual_pipeline_size={chunks}" if chunks > 1 else ""


def _more_or_fewer(difference: int) -> str:
    return f"add {difference}" if difference > 0 else f"take {-difference} away"
