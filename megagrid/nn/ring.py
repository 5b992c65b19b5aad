"""Ring attention: keys and values go from rank to rank, and each attends to what it has of them.

    step       0          1          2          3          cp 4, as rank 0 sees it
    forward    kv 0  -->  kv 3  -->  kv 2  -->  kv 1       the next is on its way meanwhile
    backward   kv 0  -->  kv 3  -->  kv 2  -->  kv 1
               dkv 0 -->  dkv 3 -->  dkv 2 -->  dkv 1 -->  dkv 0: a step behind, home at last

Of each rank's keys a query sees what `megagrid.nn.blockwise` makes blocks of; the parts are put
together by their normalisers. Gradients travel in float32 or wider, for they are sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagrid.comm.opaque import opaque
from megagrid.comm.p2p import Message, Pending, post
from megagrid.grid import zigzag
from megagrid.grid.grid import Axis
from megagrid.nn.attention_kernels import attend
from megagrid.nn.blockwise import InputGradients, Sums, blocks


class _Ring:
    """A tensor that goes round: `here` is what this rank has of it now."""

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        self.here = tensor
        self._axis = axis
        self._under_way: list[Pending] = []

    def pass_on(self) -> None:
        """Begin to send what is here to the next rank, and to receive from the one before."""
        size, rank = self._axis.size, self._axis.rank
        there = torch.empty_like(self.here)
        messages = [
            Message(self.here, (rank + 1) % size, is_send=True),
            Message(there, (rank - 1) % size, is_send=False),
        ]
        self._under_way = post(messages, self._axis)

    def arrive(self) -> None:
        """Wait for what `pass_on` has begun."""
        for pending in self._under_way:
            pending.wait()
        self.here = self._under_way[-1].message.tensor
        self._under_way = []


def _like_forward(
    q: Tensor, kv: Tensor, documents: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


@opaque(_like_forward)
def _forward(q: Tensor, kv: Tensor, documents: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries, and the logarithm of its normaliser.

    Args:
        q: (b, heads, n, d).
        kv: (2, b, kv heads, n, d), this rank's.
        group: the name of cp's.
    """
    axis = Axis.of_group("cp", group)
    ring = _Ring(kv, axis)
    runs: dict[int, Sums] = {}
    for step, of_runs in enumerate(_steps(q, axis, documents)):
        is_last = step == axis.size - 1
        if not is_last:
            ring.pass_on()
        k, v = ring.here
        for of_run in of_runs:
            for block in of_run:
                sums = runs.setdefault(block.rows.start, Sums())
                sums.add(*attend(block.part(q, k, v, documents)))
        if not is_last:
            ring.arrive()
    in_order = [runs[row] for row in sorted(runs)]
    out = torch.cat([sums.out.to(q.dtype) for sums in in_order], dim=2)
    return out.contiguous(), torch.cat([sums.lse for sums in in_order], dim=2).contiguous()


def _like_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(kv)


@opaque(_like_backward)
def _backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of `q` and `kv`, from that of `out`."""
    axis = Axis.of_group("cp", group)
    ring, gradients_ring = _Ring(kv, axis), None
    dq = 0.0
    for step, of_runs in enumerate(_steps(q, axis, documents)):
        is_last = step == axis.size - 1
        if not is_last:
            ring.pass_on()
        k, v = ring.here
        here = InputGradients.zeros(q, k)
        for of_run in of_runs:
            for block in of_run:
                here.add(block, block.part(q, k, v, documents), grad, out, lse)
        dq = here.dq + dq
        dkv = torch.stack([here.dk, here.dv])
        if gradients_ring is None:
            gradients_ring = _Ring(dkv, axis)
        else:
            gradients_ring.arrive()
            gradients_ring.here += dkv
        gradients_ring.pass_on()
        if not is_last:
            ring.arrive()
    gradients_ring.arrive()
    return dq.to(q.dtype), gradients_ring.here.to(q.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, axis: Axis, documents: Tensor | None) -> Tensor:
        ctx.group = axis.group.group_name
        out, lse = _forward(q, kv, documents, ctx.group)
        ctx.save_for_backward(q, kv, out, lse, documents)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad, *ctx.saved_tensors, ctx.group), None, None


def _steps(q: Tensor, axis: Axis, documents: Tensor | None):
    """For each step the blocks of this rank's queries and the keys that it has then."""
    length = q.shape[2] * axis.size
    queries = zigzag.spans(length, axis.size, axis.rank)
    for step in range(axis.size):
        keys = zigzag.spans(length, axis.size, (axis.rank - step) % axis.size)
        yield blocks(queries, keys, masked=documents is not None)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, documents: Tensor | None) -> Tensor:
    """Causal attention over samples whose tokens are split over `axis`.

    Args:
        q: (s / axis.size, b, heads, d), the rank's chunks of `megagrid.grid.zigzag`.
        k, v: (s / axis.size, b, kv heads, d).
        documents: (b, s) the number of each token's document; None: one.

    Returns:
        (s / axis.size, b, heads, d).
    """
    kv = torch.stack([k, v]).permute(0, 2, 3, 1, 4).contiguous()
    out = _RingAttention.apply(q.permute(1, 2, 0, 3), kv, axis, documents)
    return out.permute(2, 0, 1, 3)
