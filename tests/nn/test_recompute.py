"""Regions whose activations are made again: what is kept, what is done twice, and the same bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megagrid.nn.recompute import keep, recompute
from megagrid.nn.split_backward import LateWeightGradients, linear
from tests.nn import dense

N, IN, OUT = 3, 4, 5


class Operations(TorchDispatchMode):
    """Counts what is computed, by name, while entered; compiled, as it runs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for op in (func, *args):  # one may be called by another, with a random state
            if isinstance(op, OpOverload):
                self.calls[op.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def run(region, late: LateWeightGradients | None = None) -> tuple[list[Tensor], Counter[str]]:
    """gelu and a product in a region; their gradients, and what the backward has computed."""
    x = dense.random(1, N, IN).requires_grad_()
    weight = dense.random(2, OUT, IN).requires_grad_()
    y = region(lambda x: linear(F.gelu(x), weight, None, late), x)
    with Operations() as operations:
        y.backward(dense.random(3, N, OUT))
    if late is not None:
        late.take().compute()
    return [y.detach(), x.grad, weight.grad], operations.calls


@pytest.mark.parametrize("split", [False, True], ids=["", "split backward"])
def test_a_region_is_run_again_up_to_its_product(split):
    """The product itself isn't: backward needs what it takes, not what it makes."""
    (kept, once), (made_again, twice) = (
        run(region, LateWeightGradients() if split else None) for region in (keep, recompute)
    )
    assert all(torch.equal(*pair) for pair in zip(kept, made_again, strict=True))
    assert (once["gelu"], twice["gelu"]) == (0, 1)
    assert once["mm"] == twice["mm"] == (1 if split else 2)


def test_a_region_keeps_its_inputs_alone():
    """Between forward and backward nothing refers to what was computed in between."""
    x = dense.random(1, N, IN).requires_grad_()
    inner = []

    def region(x: Tensor) -> Tensor:
        y = F.gelu(x)
        inner.append(y.untyped_storage()._weak_ref())
        return y.square()

    made_again, kept = recompute(region, x), keep(region, x)
    assert [torch.UntypedStorage._expired(reference) for reference in inner] == [True, False]
    assert torch.equal(made_again, kept)


def test_without_gradients_a_region_is_just_its_function():
    with torch.no_grad():
        assert recompute(lambda x: x, "anything") == "anything"
