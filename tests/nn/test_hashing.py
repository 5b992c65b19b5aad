"""Numbers without a generator: known bits, the right distribution, nothing that repeats."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from megagrid.nn import hashing

COUNT = 200_000
INDEX = torch.arange(COUNT)
SIGMAS = 5.0
"""A right generator strays farther once in two million times; the seeds are fixed anyway."""


def test_mix_is_splitmix64():
    """The reference implementation's first outputs for state 1234567 (Vigna's splitmix64.c)."""
    golden = -7046029254386353131
    states = torch.tensor([_signed(1234567 + golden * n) for n in range(1, 4)])
    assert [_unsigned(x) for x in hashing.mix(states).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def _unsigned(x: int) -> int:
    return x % 2**64


def test_keys_are_the_same_on_every_machine():
    assert hashing.key(1234, "weights", "embedding.weight") == 2145558289369146840
    assert hashing.key(1, "ab", "c") != hashing.key(1, "a", "bc")


def test_normal_numbers_are_the_same_on_every_machine():
    found = hashing.normal(hashing.key(1234, "weights", "embedding.weight"), torch.arange(4))
    assert found.tolist() == [
        -0.0032501220703125,
        -0.898101806640625,
        -0.7395172119140625,
        -0.2901763916015625,
    ]


def test_normal_has_the_moments_of_the_normal_distribution():
    x = hashing.normal(hashing.key("moments"), INDEX)
    assert abs(x.mean()) < SIGMAS / sqrt(COUNT)
    assert abs(x.square().mean() - 1) < SIGMAS * sqrt(2 / COUNT)
    assert abs(x.pow(3).mean()) < SIGMAS * sqrt(15 / COUNT)
    # A sum of 12 uniforms has the fourth moment 3 - 1.2 / 12.
    assert abs(x.pow(4).mean() - 2.9) < SIGMAS * sqrt(96 / COUNT)


def test_normal_has_the_normals_distribution():
    x = hashing.normal(hashing.key("distribution"), INDEX)
    for z in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0):
        below = torch.special.ndtr(torch.tensor(z, dtype=torch.float64)).item()
        # Twelve uniforms are off the normal's distribution by up to 0.002.
        assert abs((x < z).double().mean() - below) < 0.002 + SIGMAS * sqrt(0.25 / COUNT)


@pytest.mark.parametrize("lag", [1, 2, 32, 61, 4096])
def test_neighbours_are_uncorrelated(lag):
    x = hashing.normal(hashing.key("lags"), INDEX)
    assert abs((x[:-lag] * x[lag:]).mean()) < SIGMAS / sqrt(COUNT - lag)


def test_streams_are_uncorrelated():
    streams = [hashing.key(seed, "weights", f"layers.{n}.w") for seed in (1, 2) for n in (0, 1)]
    x = torch.stack([hashing.normal(stream, INDEX) for stream in streams])
    correlation = x @ x.t() / COUNT - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < SIGMAS * sqrt(2 / COUNT)


def test_any_part_of_the_indices_has_the_bits_of_the_whole():
    stream = hashing.key("parts")
    whole = hashing.normal(stream, INDEX.view(400, 500))
    assert torch.equal(hashing.normal(stream, INDEX.view(400, 500)[17:99, 3:]), whole[17:99, 3:])
    assert torch.equal(hashing.normal(stream, INDEX.flip(0)), whole.flatten().flip(0))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_keep_keeps_that_share(probability):
    stream = torch.tensor(hashing.key("keep"))
    kept = hashing.keep(stream, INDEX, probability).double().mean()
    spread = sqrt(probability * (1 - probability) / COUNT)
    assert abs(kept - probability) <= SIGMAS * spread


def test_streams_of_a_batch_are_those_of_its_samples():
    streams = torch.tensor([hashing.key("a"), hashing.key("b")])
    both = hashing.bits(streams.view(2, 1), INDEX[:100])
    for row, stream in zip(both, streams, strict=True):
        assert torch.equal(row, hashing.bits(int(stream), INDEX[:100]))


def test_what_is_kept_depends_on_the_bits_alone():
    streams = torch.tensor([hashing.key("a"), hashing.key("b")]).view(2, 1)
    highest = hashing.bits(streams, INDEX).double() % 2.0**64 / 2.0**64
    sure = (highest - 0.25).abs() > 1e-9  # doubles round the last bits away
    assert torch.equal(hashing.keep(streams, INDEX, 0.25)[sure], (highest < 0.25)[sure])
