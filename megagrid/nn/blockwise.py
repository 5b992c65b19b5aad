"""Causal attention of some runs of a sample's tokens, block by block of what they may see.

Queries and keys are given by where they lie in the sample. Of a run of keys, a run of queries sees
those before it whole, those that are its own as a triangle, and none after it:

                keys    0 … 3    4 … 7    8 … 11   12 … 15
    queries  0 … 3      causal   -        -        -
            12 … 15     whole    whole    whole    causal          whole: one block of 0 … 11

With documents a block has a mask instead. It is made where it is used, of a block's size for all
heads and layers, and nothing of it is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrid.comm.opaque import opaque
from megagrid.grid.zigzag import Spans
from megagrid.nn.attention_kernels import Part, attend, attend_backward

MASKED_QUERIES = 1024
"""Queries of a block that has a mask: the mask's size is so many times the keys."""


@dataclass(frozen=True)
class Block:
    """Some queries and keys.

    Attributes:
        rows, columns: which of the tensors'.
        queries, keys: where in the sample they lie.
        masked: it has a mask; else it is a triangle, or whole.
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    masked: bool

    def part(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Part:
        """The tensors of the block."""
        mask = visible(self.queries, self.keys, documents) if self.masked else None
        return Part(
            q[:, :, self.rows],
            k[:, :, self.columns],
            v[:, :, self.columns],
            causal=not self.masked and self.queries == self.keys,
            mask=mask,
        )


def visible(queries: range, keys: range, documents: Tensor | None, device=None) -> Tensor:
    """Which keys each query may see, (b, 1, queries, keys) bool: those up to itself, of its own
    document.

    Args:
        documents: (b, s) the number of each token's document; None: all are of one.
    """
    device = device if documents is None else documents.device
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    seen = query >= torch.arange(keys.start, keys.stop, device=device)
    if documents is None:
        return seen[None, None]
    of_queries = documents[:, queries.start : queries.stop].unsqueeze(2)
    of_keys = documents[:, keys.start : keys.stop].unsqueeze(1)
    return (seen & (of_queries == of_keys)).unsqueeze(1)


def blocks(queries: Spans, keys: Spans, *, masked: bool) -> Iterator[list[Block]]:
    """For each run of queries, the blocks that have something to see, the nearest keys first: those
    of a query's own chunk aren't all masked.

    A run of keys contains a run of queries, or the two are apart.
    """
    first_row = 0
    for run in queries:
        for part in _cut(run, MASKED_QUERIES) if masked else [run]:
            rows = slice(first_row, first_row + len(part))
            yield [
                Block(rows, columns, part, seen, masked)
                for columns, seen in reversed(list(_seen(part, keys, masked=masked)))
            ]
            first_row = rows.stop


def _cut(run: range, length: int) -> Iterator[range]:
    for start in range(run.start, run.stop, length):
        yield range(start, min(start + length, run.stop))


def _seen(queries: range, keys: Spans, *, masked: bool) -> Iterator[tuple[slice, range]]:
    first_column = 0
    for run in keys:
        # A mask has the triangle in it; without one it is a block of its own.
        ends = [queries.stop] if masked else [queries.start, queries.stop]
        start = run.start
        for end in ends:
            stop = min(end, run.stop)
            if start < stop:
                offset = first_column - run.start
                yield slice(start + offset, stop + offset), range(start, stop)
                start = stop
        first_column += len(run)


@dataclass
class Sums:
    """Attention of some queries, put together from blocks of keys.

    Attributes:
        out, lse: (b, heads, n, d) and (b, heads, n), of the keys so far.
    """

    out: Tensor | None = None
    lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Take in what the queries have of further keys."""
        if self.out is None:
            self.out, self.lse = out, lse
            return
        together = torch.logaddexp(self.lse, lse)
        wide = torch.promote_types(self.out.dtype, torch.float32)
        self.out = self.out.to(wide) * (self.lse - together).exp().unsqueeze(-1)
        self.out += out.to(wide) * (lse - together).exp().unsqueeze(-1)
        self.lse = together


@dataclass
class InputGradients:
    """Gradients of q, k and v that blocks add to, in float32 or wider."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor) -> InputGradients:
        wide = torch.promote_types(q.dtype, torch.float32)
        return cls(*(torch.zeros_like(t, dtype=wide) for t in (q, k, k)))

    def add(self, block: Block, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Those of a block, from gradient, out and lse of all queries."""
        rows = block.rows
        dq, dk, dv = attend_backward(part, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
        self.dq[:, :, rows] += dq
        self.dk[:, :, block.columns] += dk
        self.dv[:, :, block.columns] += dv


@opaque()
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its normaliser, see `blockwise_attention` and `_ends`."""
    runs = []
    for of_run in blocks(_spans(queries), _spans(keys), masked=documents is not None):
        sums = Sums()
        for block in of_run:
            sums.add(*attend(block.part(q, k, v, documents)))
        runs.append(sums)
    out = torch.cat([sums.out.to(q.dtype) for sums in runs], dim=2)
    return out, torch.cat([sums.lse for sums in runs], dim=2)


@opaque()
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    gradients = InputGradients.zeros(q, k)
    for of_run in blocks(_spans(queries), _spans(keys), masked=documents is not None):
        for block in of_run:
            part = block.part(q, k, v, documents)
            gradients.add(block, part, grad, out, lse)
    return gradients.dq.to(q.dtype), gradients.dk.to(q.dtype), gradients.dv.to(q.dtype)


def _ends(spans: Spans) -> list[int]:
    """Where each run starts and stops, one after the other: what an operator takes."""
    return [end for run in spans for end in (run.start, run.stop)]


def _spans(ends: Sequence[int]) -> Spans:
    """The way back of `_ends`."""
    return tuple(map(range, ends[::2], ends[1::2]))


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Spans,
        keys: Spans,
        documents: Tensor | None,
    ) -> Tensor:
        ctx.ends = _ends(queries), _ends(keys)
        out, lse = _forward(q, k, v, *ctx.ends, documents)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, documents = ctx.saved_tensors
        return *_backward(grad, *tensors, *ctx.ends, documents), None, None, None


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, documents: Tensor | None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, each query seeing the keys up to itself, of its own document.

    Args:
        q: (b, heads, n, d), at `queries` of the sample.
        k, v: (b, kv heads, m, d), at `keys`.
        documents: (b, s) the number of each of the sample's tokens' document; None: one.

    Returns:
        (b, heads, n, d).
    """
    return _Blockwise.apply(q, k, v, queries, keys, documents)
