"""Products in float8: close to the exact ones, and refused where they can't be made."""

from __future__ import annotations

import importlib.util
from unittest.mock import patch

import pytest
import torch

from megagrid.errors import ConfigError
from megagrid.nn.float8 import float8_multiply

CPU = torch.device("cpu")
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason='needs pip install "megagrid[float8]"'
)

E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Largest relative error of a rounding: half of the last bit of three, or of two."""


def test_without_torchao_the_key_is_refused_with_what_is_needed():
    with (
        patch.object(importlib.util, "find_spec", lambda name: None),
        pytest.raises(ConfigError, match="needs torchao, which") as told,
    ):
        float8_multiply("on", CPU)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("device", "capability", "words"),
    [("cpu", None, 'this one is "cpu"'), ("cuda", (8, 6), "this one has 8.6")],
)
def test_a_device_that_does_not_multiply_float8_is_refused(device, capability, words):
    with (
        patch.object(importlib.util, "find_spec", lambda name: "torchao"),
        patch.object(torch.cuda, "get_device_capability", lambda device: capability),
        pytest.raises(ConfigError, match="8.9 or more, and " + words),
    ):
        float8_multiply("on", torch.device(device))


@needs_torchao
def test_products_and_gradients_are_those_of_rounded_factors():
    """Each term of a sum errs by both factors' roundings, which are at most half of a last bit."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 64), (48, 64), (5, 48))
    )
    x.requires_grad_()
    w.requires_grad_()
    y = float8_multiply("emulated", CPU)(x, w)
    y.backward(dy)
    a, b, c = x.detach().double(), w.detach().double(), dy.double()
    for found, left, right, error in (
        (y, a, b.t(), 2 * E4M3),
        (x.grad, c, b, E4M3 + E5M2),
        (w.grad, c.t(), a, E4M3 + E5M2),
    ):
        exact, terms = left @ right, left.abs() @ right.abs()
        # Products of both errors, values below float8's normal range, and the rounding to bf16.
        assert ((found.double() - exact).abs() <= 1.1 * error * terms + 0.01 * terms.max()).all()
        assert (found.double() - exact).abs().max() > 1e-3, "nothing was rounded"


@needs_torchao
@pytest.mark.gpu
def test_an_accelerator_multiplies_as_the_emulation_does():
    """Both add up the same products of rounded factors in fp32, in another order."""
    device = torch.accelerator.current_accelerator()
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(48, 64, device=device, dtype=torch.bfloat16)
    found, expected = (float8_multiply(mode, device)(x, w) for mode in ("on", "emulated"))
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-7)
