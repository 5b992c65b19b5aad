"""Layers to stages, so that the slowest stage is as fast as can be. Pure, no torch.

5 layers, 2 stages, head as dear as 2 layers:    stage 0: 0 1 2 3      stage 1: 4 + head
"""

from __future__ import annotations

from collections.abc import Sequence

from megagrid.config.schema import ModelConfig
from megagrid.errors import ConfigError


def stage_layers(model: ModelConfig, num_stages: int, stated: Sequence[int] | None) -> list[range]:
    """The numbers of the layers of each stage, first to last.

    Args:
        stated: layers of each stage as the recipe states them; None: balanced by cost.
    """
    counts = list(stated) if stated is not None else balanced(model, num_stages)
    if len(counts) != num_stages or sum(counts) != model.num_layers:
        raise ConfigError(
            f"parallel.layers_per_stage={counts} must have {num_stages} numbers that add up to "
            f"model.num_layers={model.num_layers}"
        )
    firsts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def balanced(model: ModelConfig, num_stages: int) -> list[int]:
    """Layers of each stage, at least one, that minimise the dearest stage's multiply-adds.

    The last stage also has the head. Of equally good splits it takes the one whose first stages
    are fuller: under 1F1B their activations are more, but their wait is longer too.
    """
    if num_stages > model.num_layers:
        raise ConfigError(
            f"{num_stages} pipeline stages can't share model.num_layers={model.num_layers}; use at "
            f"most {model.num_layers} stages, or state parallel.layers_per_stage with zeros"
        )
    layer, head = layer_cost(model), head_cost(model)

    def split(limit: int) -> list[int] | None:
        """Fill stages front to back up to `limit`; None if the layers don't fit."""
        counts, left = [], model.num_layers
        for stage in range(num_stages):
            is_last = stage == num_stages - 1
            room = (limit - (head if is_last else 0)) // layer
            count = min(room, left - (num_stages - 1 - stage))
            if count < 1 or (is_last and count < left):
                return None
            counts.append(count)
            left -= count
        return counts

    limits = {count * layer for count in range(1, model.num_layers + 1)}
    limits |= {limit + head for limit in limits}
    for limit in sorted(limits):
        counts = split(limit)
        if counts is not None:
            return _levelled(counts, head / layer)
    raise AssertionError("one limit admits all layers in any stage")


def _levelled(counts: list[int], head_in_layers: float) -> list[int]:
    """Even out the stages below the limit, without moving the dearest one's cost up."""
    body, last = counts[:-1], counts[-1]
    if not body:
        return counts
    layers, stages = sum(body), len(body)
    even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [*even, last] if max(even) <= max(*body, last + head_in_layers) else counts


def layer_cost(model: ModelConfig) -> int:
    """Multiply-adds of a layer's forward per token: matrices, and attention at full length."""
    attention_width = model.num_heads * model.head_dim
    projections = model.hidden_size * (
        2 * attention_width + 2 * model.num_kv_heads * model.head_dim
    )
    matrices = 3 if model.family == "llama" else 2
    scores = model.max_seq_length * attention_width
    return projections + matrices * model.hidden_size * model.ffn_hidden_size + scores


def head_cost(model: ModelConfig) -> int:
    """Multiply-adds of the output head per token."""
    return model.hidden_size * model.vocab_size
