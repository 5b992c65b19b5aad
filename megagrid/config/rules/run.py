"""Rules of the batch, the run's length, its optimizer and its device."""

from __future__ import annotations

import re

from megagrid.config.dump import toml_value
from megagrid.config.rules.remedies import choice, multiples_near
from megagrid.config.schema import Config
from megagrid.errors import ConfigError

DEVICES = ("cpu", "cuda", "hpu", "mlu", "mps", "mtia", "musa", "npu", "xpu")
"""Types that torch has, or gets from a package of their makers."""

NO_FP64_DEVICES = ("mps",)

ADAMW_KEYS, MOMENTUM_KEYS = ("beta1", "beta2", "eps"), ("momentum", "nesterov")

MUON_KEYS = ("adamw_lr", "muon_scale", "muon_steps", "muon_dtype")

OPTIMIZER_KEYS = {
    "adamw": ADAMW_KEYS,
    "sgd": MOMENTUM_KEYS,
    "muon": (*ADAMW_KEYS, *MOMENTUM_KEYS, *MUON_KEYS),
}
"""Keys that not every optimizer reads."""

MOST_FORWARDS = 100_000
"""Of all stages in a step: it takes seconds to write down and to verify what is done in them."""


def batch_is_whole_microbatches(config: Config) -> None:
    """Every dp rank runs the same number, at least one, of microbatches of one size."""
    train, dp = config.train, config.parallel.data_parallel_size
    unit = train.micro_batch_size * (dp or 1)
    if train.global_batch_size % unit:
        product = f" x parallel.data_parallel_size={dp} = {unit}" if dp else ""
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} must be a multiple of "
            f"train.micro_batch_size={train.micro_batch_size}{product}; choose "
            f"{choice(multiples_near(train.global_batch_size, unit))}"
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
                f'"{optimizer.name}"; leave it out, or choose {choice(map(toml_value, readers))}'
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
            f"{choice(map(toml_value, DEVICES))}"
        )
    if train.precision == "fp64" and train.device in NO_FP64_DEVICES:
        raise ConfigError(
            f'train.precision="fp64" isn\'t computed by train.device="{train.device}"; choose '
            '"fp32" or "bf16", or train.device="cpu"'
        )
