"""Context parallelism: each cp rank has some tokens of every sample, and attention is what they
need each other for. How they exchange what it takes is a row of `EXCHANGES`:

    all_gather   every rank gets all keys and values, and attends with its own queries
    ulysses      every rank gets all tokens of some of the heads (Jacobs et al. 2023,
                 arXiv 2309.14509), and attends as if it were alone
    ring         keys and values go round, a rank attends to a part of them at a time (Liu et al.
                 2023, arXiv 2310.01889); nobody ever has all of them

All have the same result; along an axis of one rank all are plain attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megagrid.comm import regions
from megagrid.grid import zigzag
from megagrid.grid.grid import Axis
from megagrid.grid.zigzag import Spans
from megagrid.nn.ring import ring_attention


@dataclass(frozen=True)
class Context:
    """What the layers of a stage are told of the tokens beside their hidden states.

    Attributes:
        places: (n,) int64, where in their sample the tokens lie that the rank has between parallel
            layers: under sequence parallelism its share.
        rope: of all tokens of the cp rank, from `megagrid.nn.rope.rotation`; None: no rotation.
        documents: (b, s of the whole sample) int64, the number of each token's document, of which
            a token sees no other; None: it sees all before it.
    """

    places: Tensor
    rope: Tensor | None = None
    documents: Tensor | None = None


def tokens_of(spans: Spans, device: torch.device) -> Tensor:
    """The places of the tokens in `spans`, (n,) int64."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in spans])


class Attend(Protocol):
    """Attention on one rank: queries (n, b, heads, d) to keys (s, b, kv heads, d) of whole samples.

    Args:
        queries: where in the sample they lie.
        first_head: number of their first head, among this tp rank's.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Spans, first_head: int
    ) -> Tensor: ...


def _all_gather(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend, documents: Tensor | None
) -> Tensor:
    together = regions.gather_sample(torch.cat([k, v], dim=2), axis)
    k, v = together.chunk(2, dim=2)
    return attend(q, k, v, zigzag.spans(k.shape[0], axis.size, axis.rank), 0)


def _ulysses(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend, documents: Tensor | None
) -> Tensor:
    # Each rank gets the key/value heads of its queries: with fewer than ranks, some get the same.
    copies = max(1, axis.size // k.shape[2])
    k, v = (t.repeat_interleave(copies, dim=2) if copies > 1 else t for t in (k, v))
    by_rank = [t.unflatten(2, (axis.size, -1)) for t in (q, k, v)]
    heads = [t.shape[3] for t in by_rank]
    together = regions.to_heads(torch.cat(by_rank, dim=3).flatten(2, 3), axis)
    q, k, v = together.split(heads, dim=2)
    out = attend(q, k, v, (range(q.shape[0]),), axis.rank * heads[0])
    return regions.to_tokens(out, axis)


def _ring(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend, documents: Tensor | None
) -> Tensor:
    return ring_attention(q, k, v, axis, documents)


EXCHANGES: dict[str, Callable[..., Tensor]] = {
    "all_gather": _all_gather,
    "ulysses": _ulysses,
    "ring": _ring,
}


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    exchange: str,
    attend: Attend,
    documents: Tensor | None,
) -> Tensor:
    """Causal attention over samples whose tokens are split over `axis`.

    Args:
        q, k, v: (s / axis.size, b, heads or kv heads, d), the chunks of `megagrid.grid.zigzag`.
        exchange: name of a row of `EXCHANGES`.
        attend: what a rank does with what it gets; a ring has arithmetic of its own.

    Returns:
        (s / axis.size, b, heads, d).
    """
    if axis.size == 1:
        return attend(q, k, v, (range(q.shape[0]),), 0)
    return EXCHANGES[exchange](q, k, v, axis, attend, documents)
