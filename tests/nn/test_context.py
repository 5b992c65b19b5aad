"""Attention over a sample that several ranks share, each way of it, against the whole sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megagrid.grid import zigzag
from megagrid.grid.grid import Axis
from megagrid.nn import blockwise
from megagrid.nn.attention import Attention
from megagrid.nn.blockwise import blocks, blockwise_attention, visible
from megagrid.nn.context import EXCHANGES, Context, tokens_of
from megagrid.nn.dropout import DropoutStreams
from megagrid.nn.init import Init
from megagrid.nn.rope import rotation
from tests.nn import dense

S, B, H, HEADS, D = 16, 2, 12, 8, 4
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 8 + [2] * 5, [0] * 12 + [1] * 4])
"""Some end in a chunk, some with one, and one has tokens of all ranks."""


# ------------------------------------------------------------------------------------------------
# Chunks and blocks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_chunks_cover_a_sample_and_cost_all_ranks_the_same(size):
    ranks = [zigzag.spans(S, size, rank) for rank in range(size)]
    tokens = [tokens_of(spans, torch.device("cpu")).tolist() for spans in ranks]
    assert sorted(t for of_rank in tokens for t in of_rank) == list(range(S))
    assert len({sum(t + 1 for t in of_rank) for of_rank in tokens}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_places_put_what_ranks_have_in_order(size):
    length = 4 * size
    held = torch.cat([tokens_of(zigzag.spans(length, size, r), None) for r in range(size)])
    chunks = held.chunk(2 * size)
    assert torch.equal(torch.cat([chunks[p] for p in zigzag.places(size)]), torch.arange(length))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", range(4))
def test_blocks_have_every_pair_that_sees_each_other_once(monkeypatch, rank, masked):
    """As a ring's rank meets them: its queries, and each rank's keys."""
    monkeypatch.setattr(blockwise, "MASKED_QUERIES", 3)
    length = 32
    queries = zigzag.spans(length, 4, rank)
    count, rows = torch.zeros(length, length, dtype=torch.int64), set()
    for other in range(4):
        for of_run in blocks(queries, zigzag.spans(length, 4, other), masked=masked):
            for block in of_run:
                rows.add((block.rows.start, block.queries.start))
                pairs = count[block.queries.start : block.queries.stop]
                pairs = pairs[:, block.keys.start : block.keys.stop]
                whole = not block.masked and block.queries != block.keys
                pairs += 1 if whole else visible(block.queries, block.keys, None)[0, 0].long()
    own = tokens_of(queries, torch.device("cpu"))
    assert torch.equal(count[own], torch.ones(length, length, dtype=torch.int64).tril()[own])
    assert count.sum() == count[own].sum()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("queries", [(range(16),), (range(4, 8), range(8, 12)), (range(12, 16),)])
def test_blockwise_attention_equals_its_definition(monkeypatch, queries, documents):
    monkeypatch.setattr(blockwise, "MASKED_QUERIES", 3)
    q, k, v = (dense.random(i, B, HEADS if i == 1 else 2, S, D) for i in (1, 2, 3))
    rows = tokens_of(queries, None)
    mine, whole = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    out = blockwise_attention(mine[0][:, :, rows], *mine[1:], queries, (range(S),), documents)
    expected = definition(*whole, documents)[:, :, rows]
    grad = dense.random(4, *out.shape)
    dense.assert_equal(out, expected)
    out.backward(grad)
    expected.backward(grad)
    for found, right in zip(mine, whole, strict=True):
        dense.assert_equal(found.grad, right.grad)


def definition(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // 2, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / D**0.5
    for sample in range(B):
        for query in range(S):
            for key in range(S):
                apart = documents is not None and (
                    documents[sample, query] != documents[sample, key]
                )
                if key > query or apart:
                    scores[sample, :, query, key] = float("-inf")
    return scores.softmax(dim=-1) @ v


# ------------------------------------------------------------------------------------------------
# The layer


def layer_on_rank(exchange: str, tp: int, kv_heads: int, dropout: float, documents, sp: bool):
    """Output, gradient of the input, and those of the parameters summed over cp."""
    torch.set_default_dtype(torch.float64)
    world = dense.axis_of_all()
    tp_axis, cp_axis = dense.grid_of_two(tp, world.size // tp)
    kv_axis = dense.neighbours(max(1, tp // kv_heads))
    layer = Attention(
        H,
        HEADS,
        kv_heads,
        D,
        tp_axis,
        kv_axis,
        cp_axis,
        exchange=exchange,
        bias=False,
        dropout=dropout,
        init=Init(std=1.0),
        out_init=Init(std=1.0),
        sequence_parallel=sp,
        qk_norm_eps=1e-3,
    )
    dense.fill(layer, weights(kv_heads))
    places = tokens_of(zigzag.spans(S, cp_axis.size, cp_axis.rank), None)
    rope = rotation(places.unsqueeze(1), D, 100.0, torch.float64)
    x, grad = (dense.random(i, S, B, H)[places] for i in (50, 60))
    if sp:
        x, grad, places = (t.chunk(tp)[tp_axis.rank].clone() for t in (x, grad, places))
    x.requires_grad_()
    keys = DropoutStreams(1, 2, torch.arange(B)).of("probabilities") if dropout else None
    y = layer(x, Context(places, rope, documents), keys)
    y.backward(grad)
    return places, y.detach(), x.grad, dense.gradients(layer)


def weights(kv_heads: int) -> dense.Tensors:
    rows = {"wq": HEADS * D, "wk": kv_heads * D, "wv": kv_heads * D, "wo": H}
    tensors = {
        f"{name}.weight": dense.random(index, n, HEADS * D if name == "wo" else H) / H**0.5
        for index, (name, n) in enumerate(rows.items())
    }
    tensors["q_norm.weight"], tensors["k_norm.weight"] = dense.random(20, 2, D)
    return tensors


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize(
    ("cp", "tp", "kv_heads", "sp"),
    [(2, 1, 2, False), (4, 1, 2, False), (4, 1, 8, False), (2, 2, 1, True), (2, 2, 2, False)],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_that_share_a_sample_compute_what_one_does(
    ranks, exchange, cp, tp, kv_heads, sp, documents
):
    dropout = 0.3 if exchange != "ring" and kv_heads == 2 else 0.0
    keys = kv_heads, dropout, documents
    ((_, whole_y, whole_grad, whole_parts),) = ranks.run(
        layer_on_rank, "all_gather", 1, *keys, False, world_size=1
    )
    results = ranks.run(layer_on_rank, exchange, tp, *keys, sp, world_size=tp * cp)
    for places, y, grad_x, _ in results:
        dense.assert_equal(y, whole_y[places], "output")
        dense.assert_equal(grad_x, whole_grad[places], "gradient of the input")
    shapes = weights(kv_heads)
    expected = dense.whole_gradients([whole_parts], shapes)
    of_cp = [
        dense.whole_gradients([parts for *_, parts in results[first : first + tp]], shapes)
        for first in range(0, tp * cp, tp)
    ]
    for name, right in expected.items():
        dense.assert_equal(sum(gradients[name] for gradients in of_cp), right, name)


def test_a_token_sees_its_own_document_alone():
    layer = Attention(
        H,
        HEADS,
        2,
        D,
        *(Axis.single(name) for name in ("tp", "kv", "cp")),
        exchange="all_gather",
        bias=False,
        dropout=0.0,
        init=Init(std=1.0),
        out_init=Init(std=1.0),
        sequence_parallel=False,
        qk_norm_eps=1e-3,
    ).double()
    dense.fill(layer, weights(2))
    x = dense.random(1, S, 1, H)
    changed = x.clone()
    changed[:3] += 1.0
    context = Context(torch.arange(S), None, DOCUMENTS[:1])
    before, after = layer(x, context, None), layer(changed, context, None)
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[:3], after[:3])
