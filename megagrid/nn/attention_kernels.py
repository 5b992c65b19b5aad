"""Attention of some queries to some keys, with the logarithm of its normaliser: what parts of a
softmax are put together by (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022).

    scores z = q k^T / sqrt(d)      lse = log sum exp z      out = exp(z - lse) v

Given the lse and out of *all* keys of a query, backward to any part of them needs no other part.
Which kernel computes it depends on the device, the dtype and on whether there is a mask: the first
row of `KERNELS` that fits. The last one is arithmetic that all devices have, and the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Part:
    """A part of attention: queries (b, heads, n, d), keys and values (b, heads, m, d).

    Attributes:
        causal: query i sees keys 0 … i, of as many; else each sees what the mask leaves.
        mask: (b or 1, 1, n, m) bool, true where a query sees a key; None: all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    mask: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """The mask as kernels take it: added to the scores, in their dtype."""
        if self.mask is None:
            return None
        hidden = torch.zeros(self.mask.shape, dtype=self.q.dtype, device=self.q.device)
        return hidden.masked_fill_(~self.mask, float("-inf"))


Outcome = tuple[Tensor, Tensor]
"""out (b, heads, n, d) in the dtype of q, and lse (b, heads, n) in float32 or wider: -inf for a
query that sees none of the keys, whose out is 0."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


@dataclass(frozen=True)
class Kernel:
    """A row of the table.

    Attributes:
        fits: whether it computes a part.
        forward: the part's outcome.
        backward: from the part, the output's gradient, and out and lse of all keys.
    """

    name: str
    fits: Callable[[Part], bool]
    forward: Callable[[Part], Outcome]
    backward: Callable[[Part, Tensor, Tensor, Tensor], Gradients]


def attend(part: Part) -> Outcome:
    """The part's outcome. Of fewer heads of keys and values each is for as many of the queries'."""
    part = _with_all_heads(part)
    return _kernel(part).forward(part)


def attend_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """The gradients of the part's tensors, in float32 or wider where heads share a key."""
    whole = _with_all_heads(part)
    dq, dk, dv = _kernel(whole).backward(whole, grad, out, lse)
    kv_heads = part.k.shape[1]
    if kv_heads != part.q.shape[1]:
        wide = torch.promote_types(dk.dtype, torch.float32)
        dk, dv = (t.unflatten(1, (kv_heads, -1)).sum(dim=2, dtype=wide) for t in (dk, dv))
    return dq, dk, dv


def _with_all_heads(part: Part) -> Part:
    shared = part.q.shape[1] // part.k.shape[1]
    if shared == 1:
        return part
    k, v = (t.repeat_interleave(shared, dim=1) for t in (part.k, part.v))
    return Part(part.q, k, v, part.causal, part.mask)


def _kernel(part: Part) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.fits(part))


# ------------------------------------------------------------------------------------------------
# CPU


def _cpu_forward(part: Part) -> Outcome:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        part.q, part.k, part.v, 0.0, part.causal, attn_mask=part.bias
    )
    if part.mask is not None:
        # It gives a query that sees nothing the lse 0.
        lse = lse.masked_fill(~part.mask.any(dim=-1), float("-inf"))
    return out, lse


def _cpu_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, part.q, part.k, part.v, out, lse, 0.0, part.causal, attn_mask=part.bias
    )


# ------------------------------------------------------------------------------------------------
# CUDA


def _flash_forward(part: Part) -> Outcome:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        part.q, part.k, part.v, 0.0, part.causal
    )
    return out, lse


def _flash_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    # Of what forward returns beside these only dropout reads anything.
    unused = torch.empty(2, dtype=torch.uint64, device=grad.device)
    n, m = part.q.shape[2], part.k.shape[2]
    tensors = grad, part.q, part.k, part.v, out, lse.contiguous()
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, None, None, n, m, 0.0, part.causal, unused, unused[:0]
    )


QUERIES_OF_A_BLOCK = 32
"""The kernel pads lse to a multiple of it."""
BIAS_ALIGNMENT = 16
"""A row of the bias begins at a multiple of so many elements."""


def _aligned_bias(part: Part) -> Tensor | None:
    bias = part.bias
    if bias is None:
        return None
    m = part.k.shape[2]
    padded = F.pad(bias, (0, -m % BIAS_ALIGNMENT))[..., :m]
    return padded.expand(*part.q.shape[:3], m)


def _efficient_forward(part: Part) -> Outcome:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        part.q, part.k, part.v, _aligned_bias(part), True, 0.0, part.causal
    )
    lse = lse[..., : part.q.shape[2]]
    if part.mask is not None:
        blind = ~part.mask.any(dim=-1)
        lse = lse.masked_fill(blind, float("-inf"))
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
    return out, lse


def _efficient_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    lse = F.pad(lse, (0, -part.q.shape[2] % QUERIES_OF_A_BLOCK), value=float("inf"))
    unused = torch.empty((), dtype=torch.int64, device=grad.device)
    return aten._scaled_dot_product_efficient_attention_backward(
        grad,
        part.q,
        part.k,
        part.v,
        _aligned_bias(part),
        out,
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        part.causal,
    )[:3]


# ------------------------------------------------------------------------------------------------
# Anywhere


def _scores(part: Part) -> Tensor:
    scores = (part.q @ part.k.transpose(-1, -2)) / math.sqrt(part.q.shape[-1])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    mask = part.mask
    if part.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _plain_forward(part: Part) -> Outcome:
    scores = _scores(part)
    lse = scores.logsumexp(dim=-1)
    seen = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
    return (scores - seen).exp().to(part.v.dtype) @ part.v, lse


def _plain_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    probabilities = (_scores(part) - lse.unsqueeze(-1)).exp()
    dv = probabilities.to(grad.dtype).transpose(-1, -2) @ grad
    along = (grad * out).sum(dim=-1, keepdim=True)
    d_scores = probabilities * (grad @ part.v.transpose(-1, -2) - along)
    d_scores = (d_scores / math.sqrt(part.q.shape[-1])).to(grad.dtype)
    return d_scores @ part.k, d_scores.transpose(-1, -2) @ part.q, dv


def _on(device: str, part: Part, dtypes: tuple[torch.dtype, ...]) -> bool:
    return part.q.device.type == device and part.q.dtype in dtypes


KERNELS = (
    Kernel(
        "flash on a CPU",
        lambda part: _on("cpu", part, (*HALF, torch.float32, torch.float64)),
        _cpu_forward,
        _cpu_backward,
    ),
    Kernel(
        "flash",
        lambda part: _on("cuda", part, HALF) and part.mask is None and part.q.shape[-1] % 8 == 0,
        _flash_forward,
        _flash_backward,
    ),
    Kernel(
        "memory-efficient",
        lambda part: _on("cuda", part, (*HALF, torch.float32)) and part.q.shape[-1] % 8 == 0,
        _efficient_forward,
        _efficient_backward,
    ),
    Kernel("plain", lambda part: True, _plain_forward, _plain_backward),
)
