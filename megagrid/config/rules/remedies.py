"""What would work in place of a value that doesn't: the other half of a rule's message."""

from __future__ import annotations

from collections.abc import Iterable

from megagrid.config.schema import ModelConfig

LARGEST_CHOICE = 4096
"""Divisors above it are of no use to anyone, and would take long to find for a mistyped number."""


def divide(a: int, b: int) -> bool:
    """Whether one of them divides the other."""
    return a % b == 0 or b % a == 0


def divisors(number: int) -> list[int]:
    """Of `number`, up to `LARGEST_CHOICE`."""
    return [d for d in range(1, min(number, LARGEST_CHOICE) + 1) if number % d == 0]


def tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """Every tp that splits the model's layers."""
    return [
        tp
        for tp in divisors(model.num_heads)
        if model.ffn_hidden_size % tp == 0 and divide(tp, model.num_kv_heads)
    ]


def multiples_near(number: int, unit: int) -> list[int]:
    """The multiples of `unit` on either side of `number`."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def choice(values: Iterable[object]) -> str:
    """For example: 1, 2 or 4."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def times(chunks: int) -> str:
    """The factor of the chunks in a product that a message writes out; nothing if it is 1."""
    return f" x parallel.virtual_pipeline_size={chunks}" if chunks > 1 else ""


def more_or_fewer(difference: int) -> str:
    """What makes up for layers that are missing, or too many if negative."""
    return f"add {difference}" if difference > 0 else f"take {-difference} away"
