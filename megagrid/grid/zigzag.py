"""Which tokens of a sample each cp rank has, so that causal attention costs all the same. Pure.

A token looks at all before it, so the last ranks of an even cut would have most to do. Hence 2 cp
chunks, of which rank r has chunks r and 2 cp - 1 - r (Dubey et al. 2024, arXiv 2407.21783, section
3.3.2): each rank has a cheap and a dear one.

    cp 2, 16 tokens      0 1 2 3     4 5 6 7     8 9 10 11    12 13 14 15
                         rank 0      rank 1      rank 1       rank 0
"""

from __future__ import annotations

Spans = tuple[range, ...]
"""Runs of consecutive tokens, in the order in which a rank has them."""


def spans(length: int, size: int, rank: int) -> Spans:
    """The tokens of `rank`, of a sample of `length` tokens; 2 `size` divides it, or `size` is 1."""
    if size == 1:
        return (range(length),)
    chunk = length // (2 * size)
    return tuple(range(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))


def places(size: int) -> list[int]:
    """Where, of what the ranks have one after the other, each chunk of the sample is.

    For cp 2, whose ranks have chunks 0 3 1 2, it is 0 2 3 1.
    """
    held = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    return [held.index(chunk) for chunk in range(2 * size)]
