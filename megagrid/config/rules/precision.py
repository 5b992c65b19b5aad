"""Rules of memory and precision: recomputation, rounded states, scaled losses, guards."""

from __future__ import annotations

from megagrid.config.rules.remedies import choice, multiples_near
from megagrid.config.schema import Config
from megagrid.errors import ConfigError

PUT_OFF_WEIGHTS = ("ZB1P", "ZBV")
"""Schedules that put the gradients of weights off."""

LARGEST_ROUNDED_BETA = 1 - 2**-8
"""Of moments in bf16, whose last bit is worth up to 2^-7 of them."""


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
                f"{name} makes {side}; choose {choice(multiples_near(side, 16))}, or "
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


def guard_fills_its_window(config: Config) -> None:
    """Until it has seen as many steps, it takes none for a spike."""
    guard, steps = config.guard, config.train.total_steps
    if guard.on_spike != "off" and guard.window >= steps:
        raise ConfigError(
            f'guard.on_spike="{guard.on_spike}" would never act: guard.window={guard.window} steps '
            f"come before it, and the run has {steps}; "
            + (f"choose a window below {steps}" if steps > 2 else 'choose on_spike="off"')
        )
