"""Where the hidden matrices of a model lie, and which rank orthogonalises which. Pure.

Muon's update of a matrix is a function of all of it, while the matrix lies in boxes on the ranks of
tp (rows or columns) and of dp (rows of what a tp rank has). The ranks that hold boxes of the same
matrices, those with the same stages, are its *holders*, numbered dp first, tp innermost:

    wk, rows over tp 2, each local stack cut over dp 2; holders (dp, tp) 0 = (0, 0) … 3 = (1, 1)

    local stack of tp 0     of tp 1
    | wq rows |  holder 0   | wq rows |  holder 1           wk    rows 0 … n/2 - 1   holder 2
    | wk rows |  holder 2   | wk rows |  holder 3                 rows n/2 … n - 1   holder 3

The matrices are dealt to the holders, dearest first, a bucket of as many as there are holders at a
time. So ranks work on matrices of about the same cost at once, each matrix is orthogonalised once,
and a rank has no more than one whole matrix in memory, beside its shares of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holders:
    """The ranks that hold boxes of the same matrices.

    Attributes:
        dp: ranks with equal parameters, before they are cut over them: dp's, times cp's.
        tp: ranks along tp.
    """

    dp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True)
class Matrix:
    """A global matrix in the local stacks (dim 0) of its holders.

    Attributes:
        shape: rows and columns of all of it.
        parts: into how many parts tp cuts its rows and its columns; further ranks have copies.
        top: its first row in a local stack.
        stack: rows of a local stack.
        cuts: into how many parts dp cuts a stack; further ranks repeat them.
    """

    shape: tuple[int, int]
    parts: tuple[int, int]
    top: int
    stack: int
    cuts: int = 1

    @property
    def cost(self) -> int:
        """Of an iteration of Newton and Schulz, up to a factor: the larger side counts once."""
        return min(self.shape) ** 2 * max(self.shape)

    def box(self, holders: Holders, rank: int) -> tuple[range, range]:
        """Rows and columns of the matrix that holder `rank` has; maybe none."""
        dp_rank, tp_rank = divmod(rank, holders.tp)
        chunk = -(-self.stack // self.cuts)
        first = dp_rank % self.cuts * chunk
        rows, columns = (size // parts for size, parts in zip(self.shape, self.parts, strict=True))
        here = range(max(first, self.top), min(first + chunk, self.top + rows))
        part = tp_rank // self._copies(holders)
        row = part * rows if self.parts[0] > 1 else 0
        column = part * columns if self.parts[1] > 1 else 0
        if not here:
            return range(0), range(0)
        start = row + here.start - self.top
        return range(start, start + len(here)), range(column, column + columns)

    def sent(self, holders: Holders, rank: int, *, gather: bool) -> int:
        """Numbers of the box of holder `rank`; 0, where they are gathered, if another of the ranks
        that have that box speaks for it."""
        dp_rank, tp_rank = divmod(rank, holders.tp)
        if gather and (dp_rank >= self.cuts or tp_rank % self._copies(holders)):
            return 0
        rows, columns = self.box(holders, rank)
        return len(rows) * len(columns)

    def _copies(self, holders: Holders) -> int:
        return holders.tp // (self.parts[0] * self.parts[1])


def deal(matrices: Sequence[Matrix], holders: Holders) -> list[list[int]]:
    """The numbers of `matrices`, in buckets: the first of each is holder 0's, and so on."""
    dearest_first = sorted(range(len(matrices)), key=lambda i: -matrices[i].cost)
    size = holders.size
    return [dearest_first[i : i + size] for i in range(0, len(matrices), size)]


def splits(
    bucket: Sequence[Matrix], holders: Holders, rank: int, *, gather: bool
) -> tuple[list[int], list[int]]:
    """How many numbers lie between holder `rank` and each other one, on the way to the owners of a
    bucket (`gather`) or back.

    Returns:
        those of `rank`'s boxes of each owner's matrix, and those of each holder's box of the matrix
        that `rank` owns. The first are sent where they are gathered, the second got; and the other
        way round on the way back.
    """
    shares = [matrix.sent(holders, rank, gather=gather) for matrix in bucket]
    shares += [0] * (holders.size - len(bucket))
    if rank >= len(bucket):
        return shares, [0] * holders.size
    owned = bucket[rank]
    return shares, [owned.sent(holders, other, gather=gather) for other in range(holders.size)]
