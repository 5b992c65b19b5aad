"""Rules of [model]: shapes that fit, and keys that the family reads."""

from __future__ import annotations

from megagrid.config.dump import toml_value
from megagrid.config.rules.remedies import choice, divisors
from megagrid.config.schema import Config
from megagrid.errors import ConfigError

LLAMA_KEYS = {"qkv_bias": False, "qk_norm": False, "rope_scaling": "none"}
"""Keys that a gpt has no use for, and their value there."""

PLANE_BY_PLANE = (
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_seq_length",
)

ROPE_SCALING_KEYS = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "llama3": PLANE_BY_PLANE,
    "yarn": PLANE_BY_PLANE,
}
"""What each kind of RoPE scaling is made of."""

ROPE_SCALING_OPTIONS = {"yarn": ("rope_attention_factor",)}
"""What may be stated beside it."""


def kv_heads_divide_heads(config: Config) -> None:
    """Each key/value head serves the same number of heads."""
    model = config.model
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads="
            f"{model.num_heads}; choose {choice(divisors(model.num_heads))}"
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
