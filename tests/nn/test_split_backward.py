"""A linear layer whose weight gradient comes later: the same gradients, and nothing kept after."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional as F

from megagrid.nn.split_backward import LateWeightGradients, linear
from tests.nn import dense

S, B, IN, OUT = 4, 3, 6, 5


def leaves(bias: bool) -> list[torch.Tensor]:
    tensors = [dense.random(1, S, B, IN), dense.random(2, OUT, IN)]
    tensors += [dense.random(3, OUT)] if bias else []
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_gradients_in_two_halves_equal_those_at_once(bias):
    x, w, *b = leaves(bias)
    F.linear(x, w, *b).backward(dense.random(9, S, B, OUT))
    late_x, late_w, *late_b = leaves(bias)
    late = LateWeightGradients()
    y = linear(late_x, late_w, late_b[0] if bias else None, late)
    y.backward(dense.random(9, S, B, OUT))
    dense.assert_equal(late_x.grad, x.grad)
    assert late_w.grad is None
    late.take().compute()
    dense.assert_equal(late_w.grad, w.grad)
    if bias:
        dense.assert_equal(late_b[0].grad, b[0].grad)


def test_what_is_taken_belongs_to_one_backward():
    _, w = leaves(False)
    late = LateWeightGradients()
    taken = []
    for scale in (1.0, 10.0):
        x = dense.random(1, S, B, IN)
        linear(x, w, None, late).backward(torch.full((S, B, OUT), scale, dtype=x.dtype))
        taken.append(late.take())
    expected = torch.ones(OUT, S * B, dtype=torch.float64) @ dense.random(1, S * B, IN)
    taken[1].compute()
    dense.assert_equal(w.grad, 10 * expected)
    taken[0].compute()
    dense.assert_equal(w.grad, 11 * expected)


def test_late_gradients_keep_no_graph_and_no_input():
    """A gradient with a graph would hold every activation of the step."""
    x, w = leaves(False)
    hidden = x * 2.0
    reference = weakref.ref(hidden)
    late = LateWeightGradients()
    linear(hidden, w, None, late).backward(dense.random(9, S, B, OUT))
    del hidden
    assert reference() is not None, "the weight's gradient still needs it"
    late.take().compute()
    assert not w.grad.requires_grad
    assert reference() is None


def test_without_a_place_to_put_it_off_backward_computes_it():
    x, w = leaves(False)
    linear(x, w, None, None).backward(dense.random(9, S, B, OUT))
    assert w.grad is not None
