"""A table that is split by rows gives the rows, and gets the gradients, of the whole one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.nn.embedding import (
    PositionEmbedding,
    VocabParallelEmbedding,
    padded_vocab_size,
    vocab_layout,
)
from megagrid.nn.init import Init
from tests.nn import dense

S, B, H = 8, 3, 5
INIT = Init(std=1.0)


def token_ids(vocab_size: int) -> torch.Tensor:
    """(s, b): the first and the last id, and repeated ones, are among them."""
    ids = torch.arange(S * B).view(S, B) * 7 % vocab_size
    ids[0] = torch.tensor([0, vocab_size - 1, vocab_size - 1])
    return ids


def embed_on_rank(vocab_size: int, padded_size: int, sequence_parallel: bool):
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    layer = VocabParallelEmbedding(
        "embedding",
        vocab_size,
        padded_size,
        H,
        axis,
        init=INIT,
        sequence_parallel=sequence_parallel,
    )
    dense.fill(layer, {"embedding.weight": dense.random(1, vocab_size, H)})
    y = layer(token_ids(vocab_size))
    grad = dense.random(2, S, B, H)
    y.backward(grad.chunk(axis.size)[axis.rank] if sequence_parallel else grad)
    return y.detach(), dense.gradients(layer), layer.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(
    ("size", "vocab_size", "divisible_by"),
    [(1, 61, 8), (2, 61, 1), (2, 61, 8), (4, 61, 8), (4, 9, 4), (4, 61, 128)],
)
def test_embedding_equals_the_whole_table(ranks, size, vocab_size, divisible_by, sequence_parallel):
    """Also where padding fills most of a rank's share, or all of it; padding gets no gradient."""
    unit = divisible_by * size
    padded = -(-vocab_size // unit) * unit
    results = ranks.run(embed_on_rank, vocab_size, padded, sequence_parallel, world_size=size)
    table = dense.random(1, vocab_size, H).requires_grad_()
    expected = F.embedding(token_ids(vocab_size), table)
    expected.backward(dense.random(2, S, B, H))
    for rank, (y, _, local) in enumerate(results):
        share = expected.chunk(size)[rank] if sequence_parallel else expected
        dense.assert_equal(y, share.detach(), "output")
        first = min(vocab_size, rank * padded // size)
        last = min(vocab_size, (rank + 1) * padded // size)
        assert not local[last - first :].any(), "padding has a gradient"
    whole = dense.whole_gradients([parts for _, parts, _ in results], {"embedding.weight": table})
    dense.assert_equal(whole["embedding.weight"], table.grad, "gradient")


def positions_on_rank(sequence_parallel: bool):
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    layer = PositionEmbedding(
        "position_embedding", 2 * S, H, axis, init=INIT, sequence_parallel=sequence_parallel
    )
    dense.fill(layer, {"position_embedding.weight": dense.random(1, 2 * S, H)})
    positions = torch.arange(S).unsqueeze(1)
    grad = dense.random(2, S, 1, H)
    if sequence_parallel:
        positions, grad = (x.chunk(axis.size)[axis.rank] for x in (positions, grad))
    y = layer(positions)
    y.backward(grad)
    return y.detach(), dense.gradients(layer)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_positions_equal_the_whole_table(ranks, size, sequence_parallel):
    results = ranks.run(positions_on_rank, sequence_parallel, world_size=size)
    table = dense.random(1, 2 * S, H).requires_grad_()
    expected = F.embedding(torch.arange(S), table).unsqueeze(1)
    expected.backward(dense.random(2, S, 1, H))
    for rank, (y, _) in enumerate(results):
        share = expected.chunk(size)[rank] if sequence_parallel else expected
        dense.assert_equal(y, share.detach())
    whole = dense.whole_gradients(
        [parts for _, parts in results], {"position_embedding.weight": table}
    )
    dense.assert_equal(whole["position_embedding.weight"], table.grad)


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tp", "padded"),
    [
        (61, 1, 1, 61),
        (61, 1, 2, 62),
        (61, 8, 1, 64),
        (61, 8, 4, 64),
        (64, 8, 4, 64),
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128256, 128, 8, 129024),
    ],
)
def test_vocabulary_is_padded_to_the_next_multiple(vocab_size, divisible_by, tp, padded):
    axis = Axis("tp", tuple(range(tp)), 0)
    assert padded_vocab_size(vocab_size, divisible_by, axis) == padded


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shares_of_the_vocabulary_cover_it_once(tp):
    rows = []
    for rank in range(tp):
        axis = Axis("tp", tuple(range(tp)), rank)
        layout = vocab_layout("embedding.weight", 61, 128, H, axis, INIT)
        (piece,) = layout.pieces
        assert layout.local_shape == (128 // tp, H)
        rows += range(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0])
    assert rows == list(range(61))
