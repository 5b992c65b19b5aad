"""Layers to stages: complete, in order, and with the least dearest stage."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.config.schema import ModelConfig
from megagrid.errors import ConfigError
from megagrid.pipeline.partition import balanced, head_cost, layer_cost, stage_layers


def model(num_layers: int = 5, vocab_size: int = 61, **keys) -> ModelConfig:
    shape = {
        "num_layers": num_layers,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": vocab_size,
        "max_seq_length": 32,
    }
    return ModelConfig(**shape | keys)


def dearest(config: ModelConfig, counts: list[int]) -> int:
    costs = [count * layer_cost(config) for count in counts]
    costs[-1] += head_cost(config)
    return max(costs)


shapes = {
    "num_layers": st.integers(1, 12),
    "num_stages": st.integers(1, 12),
    "vocab_size": st.sampled_from([1, 61, 300, 1000, 5000, 20_000]),
}


@settings(deadline=None)
@given(**shapes)
def test_balanced_split_is_the_best_of_all(num_layers, num_stages, vocab_size):
    """Against every way to cut the layers into stages of one or more."""
    config = model(num_layers, vocab_size)
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=f"model.num_layers={num_layers}"):
            balanced(config, num_stages)
        return
    found = balanced(config, num_stages)
    assert len(found) == num_stages and sum(found) == num_layers and min(found) >= 1
    splits = [
        [b - a for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True)]
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]
    assert dearest(config, found) == min(dearest(config, split) for split in splits)


@settings(deadline=None)
@given(**shapes)
def test_stages_have_every_layer_once_in_order(num_layers, num_stages, vocab_size):
    if num_stages <= num_layers:
        ranges = stage_layers(model(num_layers, vocab_size), num_stages, None)
        assert [layer for layers in ranges for layer in layers] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "vocab_size", "counts"),
    [
        (5, 1, 61, [5]),
        (4, 2, 61, [2, 2]),
        (5, 2, 61, [3, 2]),
        (5, 4, 61, [2, 1, 1, 1]),
        (8, 4, 61, [2, 2, 2, 2]),
        # A head as dear as 2.6 layers: its stage has fewer, the others share the rest evenly.
        (8, 4, 1000, [3, 2, 2, 1]),
    ],
)
def test_known_splits(num_layers, num_stages, vocab_size, counts):
    assert balanced(model(num_layers, vocab_size), num_stages) == counts


@pytest.mark.parametrize("stated", [[5, 0], [0, 5], [1, 4], [2, 3]])
def test_stated_layers_are_taken_as_they_are(stated):
    ranges = stage_layers(model(), 2, stated)
    assert [len(layers) for layers in ranges] == stated


@pytest.mark.parametrize("stated", [[5], [2, 2], [3, 3], [2, 2, 1]])
def test_stated_layers_that_dont_fit_are_refused(stated):
    with pytest.raises(ConfigError, match=r"parallel\.layers_per_stage=.*model\.num_layers=5"):
        stage_layers(model(), 2, stated)


def test_costs_are_the_multiply_adds_of_the_matrices():
    """hidden 32, ffn 64, q 32, k and v 8 each: 32 (32 + 16 + 32) + 3 * 32 * 64, and scores and
    values over half of 32 positions on average, 2 * 16 * 32."""
    config = model()
    assert layer_cost(config) == 32 * 80 + 3 * 32 * 64 + 2 * 16 * 32
    assert layer_cost(model(family="gpt", num_kv_heads=8)) == 4 * 32 * 32 + 2 * 32 * 64 + 1024
    assert head_cost(config) == 32 * 61
