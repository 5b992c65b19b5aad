"""Token and position embeddings, and the vocabulary's padding.

The vocabulary is padded so that each tp rank holds equally many rows:

    vocab 61, padded to 64, tp 2:     rank 0: rows 0 … 31      rank 1: rows 32 … 60, 3 of padding

Padding rows are zero, no token id reaches them, the loss leaves them out and no checkpoint has
them.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megagrid.comm import regions
from megagrid.grid.grid import Axis
from megagrid.nn.init import Init
from megagrid.nn.layout import Box, Layout, Piece
from megagrid.nn.linear import empty_parameter, replicated_piece


def padded_vocab_size(vocab_size: int, divisible_by: int, axis: Axis) -> int:
    """`vocab_size` rounded up to a multiple of `divisible_by` times the ranks of `axis`."""
    unit = divisible_by * axis.size
    return -(-vocab_size // unit) * unit


def vocab_layout(
    name: str, vocab_size: int, padded_size: int, hidden_size: int, axis: Axis, init: Init
) -> Layout:
    """This rank's rows of a (vocab_size, hidden_size) matrix whose padded rows are split evenly."""
    local_rows = padded_size // axis.size
    first = min(axis.rank * local_rows, vocab_size)
    last = min(first + local_rows, vocab_size)
    piece = Piece(
        name=name,
        shape=(vocab_size, hidden_size),
        box=Box((first, 0), (last - first, hidden_size)),
        local_rows=local_rows,
        init=init,
    )
    return Layout((piece,), decay=True)


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, the table split over `axis` by rows.

    Each rank looks up the ids that it has and contributes zeros for the others.

    Args:
        shared_over: the axis whose other rank holds the same table as output head, if tied and in
            another stage; each has a summand of the gradient.

    Shape: (s, b) -> (s, b, h), or (s / axis.size, b, h) with `sequence_parallel`.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        axis: Axis,
        *,
        init: Init,
        sequence_parallel: bool,
        shared_over: Axis | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        layout = vocab_layout(f"{name}.weight", vocab_size, padded_size, hidden_size, axis, init)
        if shared_over is not None:
            layout = layout.replicated(shared_over, partial=True)
        self.layouts = {"weight": layout}
        self.weight = empty_parameter(layout)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self.axis.rank * self.weight.shape[0]
        elsewhere = (local_ids < 0) | (local_ids >= self.weight.shape[0])
        rows = F.embedding(local_ids.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return regions.leave(rows, self.axis, sequence_parallel=self.sequence_parallel)


class PositionEmbedding(nn.Module):
    """Learned vectors by position, whole on every rank of `axis`.

    Shape: (n, b or 1) positions -> (n, b or 1, h). With `sequence_parallel` n is this rank's share,
    and its gradients are summands.
    """

    def __init__(
        self,
        name: str,
        max_positions: int,
        hidden_size: int,
        axis: Axis,
        *,
        init: Init,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        piece = replicated_piece(
            f"{name}.weight",
            (max_positions, hidden_size),
            axis,
            init,
            partial=sequence_parallel,
        )
        self.layouts = {"weight": Layout((piece,), decay=True)}
        self.weight = empty_parameter(self.layouts["weight"])

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight)
