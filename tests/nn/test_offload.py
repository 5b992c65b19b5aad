"""What a layer keeps, on the host between forward and backward: gone from the device, the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megagrid.nn.offload import LEAST_BYTES, HostedForward, Lane
from megagrid.nn.recompute import recompute

WIDTH, TOKENS, LAYERS = 64, 64, 4
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Keeps its input, two views of a product, and their activation; two of those are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.inner: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(F.rms_norm(x, (WIDTH,)), self.weight)
        gate, up = both.chunk(2, dim=-1)
        self.inner.append(both.untyped_storage()._weak_ref())
        return x + F.silu(gate) * up


def gradients(device: torch.device, *, hosted: bool, region=None) -> tuple[list[Tensor], bool, int]:
    """Of all parameters and the input; whether a layer's product was let go of between forward and
    backward; and bytes on the device then, of an accelerator."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device)
    x = torch.randn(TOKENS, WIDTH, device=device).requires_grad_()
    forward, y = HostedForward(Lane(device), [x]), x
    for layer in layers:
        run = (lambda x, layer=layer: region(layer, x)) if region else layer
        if not hosted:
            y = run(y)
            continue
        with forward.layer(layer):
            y = run(y)
    forward.end()
    gone = torch.UntypedStorage._expired(layers[0].inner[0])
    held = 0
    if device.type != "cpu":
        torch.accelerator.synchronize()
        held = torch.accelerator.memory_allocated(device)
    y.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layers.parameters())], gone, held


@pytest.mark.parametrize("region", [None, recompute], ids=["", "recomputed"])
def test_gradients_are_the_same_and_nothing_is_kept_meanwhile(region):
    expected, was_gone, _ = gradients(CPU, hosted=False, region=region)
    found, is_gone, _ = gradients(CPU, hosted=True, region=region)
    assert (was_gone, is_gone) == (region is not None, True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_each_storage_is_copied_once_and_parameters_never():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(TOKENS, WIDTH).requires_grad_()
    forward = HostedForward(Lane(CPU), [x])
    with forward.layer(layer):
        y = layer(x * 1.0)
    copied = [kept.host.nbytes for kept in forward._last.storages.values()]
    product = 2 * TOKENS * WIDTH * 4
    assert copied.count(product) == 1
    assert sum(copied) <= product + 5 * TOKENS * WIDTH * 4
    assert min(copied) >= LEAST_BYTES
    y.sum().backward()


def test_a_tensor_that_is_asked_for_twice_comes_twice():
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    forward = HostedForward(Lane(CPU), [])
    with forward.layer(nn.Identity()):
        y = (x * 1.0).exp()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_an_accelerator_holds_less_meanwhile_and_computes_the_same():
    device = torch.accelerator.current_accelerator()
    expected, _, held = gradients(device, hosted=False)
    found, is_gone, left = gradients(device, hosted=True)
    assert is_gone
    assert left <= held - (LAYERS - 1) * 2 * TOKENS * WIDTH * 4
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
