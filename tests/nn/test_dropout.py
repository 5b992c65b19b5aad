"""Dropout's masks depend on what is dropped, not on who computes it or when."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from megagrid.nn.dropout import DropoutStreams, attention_dropout, dropout

S, B, H = 16, 4, 24
HEADS = 8
PLACES = torch.arange(S)


def streams(step: int = 3, samples: tuple[int, ...] = (10, 11, 12, 13), seed: int = 1):
    return DropoutStreams(seed, step, torch.tensor(samples))


def mask(rate: float = 0.3, place: str = "layers.0.mlp", first: int = 0, s: int = S, **keys):
    """What is left of ones."""
    given, places = streams(**keys), torch.arange(first, first + s)
    return dropout(torch.ones(s, len(given.sample_ids), H), rate, given.of(place), places)


def attention_mask(first_head: int = 0, heads: int = HEADS, queries=PLACES, **keys) -> Tensor:
    given = streams(**keys)
    ones = torch.ones(len(given.sample_ids), heads, len(queries), S)
    of_place = given.of("layers.0.attention.probabilities")
    return attention_dropout(ones, 0.3, of_place, first_head, queries)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_is_dropped_and_the_rest_keeps_the_mean(rate):
    kept = dropout(torch.ones(64, 4, 512), rate, streams().of("place"), torch.arange(64))
    values = kept.unique().tolist()
    assert values == [0.0, pytest.approx(1 / (1 - rate))]
    count = kept.numel()
    share = (kept > 0).double().mean().item()
    assert abs(share - (1 - rate)) < 5 * sqrt(rate * (1 - rate) / count)


def test_nothing_is_dropped_at_rate_0_or_in_an_evaluation():
    x = torch.randn(S, B, H)
    assert dropout(x, 0.0, streams().of("place"), PLACES) is x
    assert dropout(x, 0.5, None, PLACES) is x


@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_the_sequence_drop_what_the_whole_drops(size):
    shares = [mask(first=rank * S // size, s=S // size) for rank in range(size)]
    assert torch.equal(torch.cat(shares), mask())


@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_the_heads_drop_what_the_whole_drops(size):
    heads = HEADS // size
    shares = [attention_mask(first_head=rank * heads, heads=heads) for rank in range(size)]
    assert torch.equal(torch.cat(shares, dim=1), attention_mask())


def test_some_queries_drop_what_all_drop():
    some = torch.tensor([3, 4, 9])
    assert torch.equal(attention_mask(queries=some), attention_mask()[:, :, some])


@pytest.mark.parametrize("draw", [mask, attention_mask], ids=["hidden", "attention"])
def test_a_sample_drops_the_same_in_any_microbatch(draw):
    dim = 1 if draw is mask else 0
    alone = [draw(samples=(sample,)) for sample in (10, 11, 12, 13)]
    assert torch.equal(torch.cat(alone, dim=dim), draw())
    assert torch.equal(draw(samples=(13, 10)), torch.cat([alone[3], alone[0]], dim=dim))


@pytest.mark.parametrize(
    "change",
    [{"place": "layers.1.mlp"}, {"step": 4}, {"seed": 2}, {"samples": (20, 21, 22, 23)}],
    ids=str,
)
def test_another_place_step_seed_or_sample_drops_others(change):
    """As independent masks do: both keep 0.7^2 of the elements."""
    both = ((mask() > 0) & (mask(**change) > 0)).double().mean().item()
    assert abs(both - 0.49) < 5 * sqrt(0.49 * 0.51 / mask().numel())


def test_samples_and_positions_of_one_forward_drop_differently():
    kept = (mask() > 0).flatten(2)
    for dim in (0, 1):
        rows = kept.unbind(dim)
        assert all(not torch.equal(rows[0], row) for row in rows[1:])


def test_gradient_is_dropped_with_the_same_mask():
    x = torch.randn(S, B, H, requires_grad=True)
    y = dropout(x, 0.3, streams().of("layers.0.mlp"), PLACES)
    y.sum().backward()
    assert torch.equal(x.grad, mask())


def test_low_precision_drops_the_same_elements():
    x = torch.ones(S, B, H, dtype=torch.bfloat16)
    kept = dropout(x, 0.3, streams().of("layers.0.mlp"), PLACES)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept > 0, mask() > 0)
