"""Each kernel's attention, and its backward to a part of the keys, against plain float64."""

from __future__ import annotations

import pytest
import torch

from megagrid.nn.attention_kernels import KERNELS, Part, attend, attend_backward
from tests.nn import dense

PLAIN = KERNELS[-1]
B, HEADS, KV_HEADS, N, M, D = 2, 4, 2, 5, 7, 8

MASK = dense.random(9, B, 1, N, M) > 0
MASK[0, :, 2] = False
"""One query sees nothing."""


def part_of(kind: str, dtype: torch.dtype, device: str = "cpu", kv_heads: int = HEADS) -> Part:
    m = N if kind == "causal" else M
    q = dense.random(1, N, B, HEADS, D).permute(1, 2, 0, 3)
    k, v = dense.random(2, 2, m, B, kv_heads, D).permute(0, 2, 3, 1, 4)
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    mask = MASK.to(device) if kind == "masked" else None
    return Part(q, k, v, causal=kind == "causal", mask=mask)


def exactly(part: Part) -> Part:
    return Part(*(t.double() for t in (part.q, part.k, part.v)), part.causal, part.mask)


@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kernel_equals_plain_float64(kernel, kind, dtype):
    check(kernel, part_of(kind, dtype), {8: 1e-12, 4: 1e-5, 2: 0.05}[dtype.itemsize])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_equals_plain_float64_on_an_accelerator(kernel, kind, dtype):
    device = torch.accelerator.current_accelerator().type
    check(kernel, part_of(kind, dtype, device), {4: 1e-3, 2: 0.05}[dtype.itemsize])


def check(kernel, part: Part, tolerance: float) -> None:
    if not kernel.fits(part):
        pytest.skip("the table gives it another kernel")
    exact = exactly(part)
    out, lse = kernel.forward(part)
    expected = PLAIN.forward(exact)
    close(out, expected[0], tolerance)
    close(lse, expected[1], tolerance)
    grad = dense.random(3, *out.shape).to(out)
    # As if there were more keys: lse and out are of all of them.
    more = torch.logaddexp(lse, torch.ones_like(lse))
    found = kernel.backward(part, grad, out, more)
    right = PLAIN.backward(exact, grad.double(), out.double(), more.double())
    for tensor, exactly_it in zip(found, right, strict=True):
        close(tensor, exactly_it, tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
def test_plain_gradients_are_the_derivative(kind):
    part = part_of(kind, torch.float64)
    tensors = [t.clone().requires_grad_() for t in (part.q, part.k, part.v)]
    out, lse = PLAIN.forward(Part(*tensors, part.causal, part.mask))
    grad = dense.random(3, *out.shape)
    expected = torch.autograd.grad(out, tensors, grad)
    lse = lse.detach().masked_fill(lse == float("-inf"), 0.0)
    for found, right in zip(PLAIN.backward(part, grad, out.detach(), lse), expected, strict=True):
        dense.assert_equal(found, right.nan_to_num())


def test_heads_that_share_keys_add_up_their_gradients():
    few = part_of("causal", torch.float64, kv_heads=KV_HEADS)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (few.k, few.v))
    all_heads = Part(few.q, k, v, causal=True)
    out, lse = attend(all_heads)
    dense.assert_equal(attend(few)[0], out)
    grad = dense.random(3, *out.shape)
    dq, *shared = attend_backward(few, grad, out, lse)
    expected_dq, *expected = attend_backward(all_heads, grad, out, lse)
    dense.assert_equal(dq, expected_dq)
    for found, right in zip(shared, expected, strict=True):
        dense.assert_equal(found, right.unflatten(1, (KV_HEADS, -1)).sum(dim=2))
