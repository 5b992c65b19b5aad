"""Where rows of a local parameter lie in the model, for any pieces and any cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megagrid.grid.grid import Axis
from megagrid.nn.init import ZEROS
from megagrid.nn.layout import Box, Layout, Piece, Sharing, parameter_shards


@st.composite
def layouts(draw) -> Layout:
    """A stack of boxes of global matrices, some with padding below them, some empty."""
    columns = draw(st.integers(1, 4))
    pieces = []
    for index in range(draw(st.integers(1, 4))):
        rows, padding = draw(st.integers(0, 7)), draw(st.integers(0, 3))
        before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        pieces.append(
            Piece(
                name=f"w{index}",
                shape=(before + rows + after, left + columns + right),
                box=Box((before, left), (rows, columns)),
                local_rows=rows + padding,
                init=ZEROS,
            )
        )
    return Layout(tuple(pieces), decay=True)


def owners(layout: Layout) -> list[tuple[str, int] | None]:
    """Row by row: the global tensor and row that it is of, None for padding."""
    rows: list[tuple[str, int] | None] = []
    for piece in layout.pieces:
        rows += [(piece.name, piece.box.offsets[0] + row) for row in range(piece.box.sizes[0])]
        rows += [None] * (piece.local_rows - piece.box.sizes[0])
    return rows


@settings(deadline=None)
@given(layouts(), st.data())
def test_rows_names_the_owner_of_every_row_of_a_cut(layout, data):
    expected = owners(layout)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    found: list[tuple[str, int] | None] = [None] * (stop - start)
    for piece, rows in layout.rows(start, stop):
        assert piece.local_rows == piece.box.sizes[0] == rows.stop - rows.start > 0
        for row in range(rows.start, rows.stop):
            assert found[row] is None, "a row has two owners"
            found[row] = piece.name, piece.box.offsets[0] + row - rows.start
    assert found == expected[start:stop]


@settings(deadline=None)
@given(layouts(), st.data())
def test_rows_of_adjoining_cuts_are_the_rows_of_the_whole(layout, data):
    """Whatever the number of shards: dp ranks together hold what one holds."""
    total = layout.local_shape[0]
    inner = data.draw(st.lists(st.integers(0, total), max_size=5))
    cuts = [0, *sorted(inner), total]
    elements = [
        (piece.name, row)
        for start, stop in pairwise(cuts)
        for piece, _ in layout.rows(start, stop)
        for row in range(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0])
    ]
    assert elements == [owner for owner in owners(layout) if owner is not None]


@settings(deadline=None)
@given(layouts())
def test_cuts_keep_all_but_their_rows(layout):
    for piece, _ in layout.rows(0, layout.local_shape[0]):
        (whole,) = (p for p in layout.pieces if p.name == piece.name)
        assert (piece.shape, piece.box, piece.init) == (whole.shape, whole.box, whole.init)
        assert (piece.replicas, piece.partial) == (whole.replicas, whole.partial)


def piece(name: str = "w", **keys) -> Piece:
    return Piece(name, (2, 3), Box((0, 0), (2, 3)), local_rows=2, init=ZEROS, **keys)


def test_names_are_global_below_their_parent():
    layout = Layout((piece("wq.weight"), piece("wk.weight")), decay=True)
    named = layout.named("layers.3.attention.")
    assert [p.name for p in named.pieces] == [
        "layers.3.attention.wq.weight",
        "layers.3.attention.wk.weight",
    ]


@pytest.mark.parametrize("is_partial", [False, True])
def test_replication_is_added_to_every_piece(is_partial):
    tp, dp = Axis("tp", (0, 1), 0), Axis("dp", (0, 2), 1)
    layout = Layout((piece(replicas=(tp,), partial=(tp,)), piece()), decay=False)
    replicated = layout.replicated(dp, partial=is_partial)
    assert [p.replicas for p in replicated.pieces] == [(tp, dp), (dp,)]
    more = (dp,) if is_partial else ()
    assert [p.partial for p in replicated.pieces] == [(tp, *more), more]
    assert not replicated.decay


@pytest.mark.parametrize(
    ("tp_rank", "dp_rank", "counts"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)]
)
def test_one_of_the_replicas_counts(tp_rank, dp_rank, counts):
    axes = Axis("tp", (0, 1), tp_rank), Axis("dp", (0, 2), dp_rank)
    assert piece(replicas=axes).is_counted_here is counts


class Twice(nn.Module):
    """Two layers that state their parameters."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layouts = {"weight": Layout((piece("inner.weight"),), decay=True)}
            self.weight = nn.Parameter(torch.zeros(2, 3))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Layer(), self.Layer()


def test_shards_share_their_parameters_memory():
    module = Twice()
    shards = parameter_shards(module)
    assert [shard.name for shard in shards] == ["first.weight", "second.weight"]
    assert [shard.grad for shard in shards] == [None, None]
    shards[0].tensor.fill_(7.0)
    module.first.weight.grad = torch.ones(2, 3)
    shards[0].grad.mul_(3.0)
    assert (module.first.weight == 7.0).all()
    assert (module.first.weight.grad == 3.0).all()
    assert not module.second.weight.any()


def test_replication_over_an_axis_reaches_every_shard():
    dp = Axis("dp", (0, 1), 1)
    shards = parameter_shards(Twice(), lambda module: Sharing(Axis.single("shard"), dp))
    assert [p.replicas for shard in shards for p, _ in shard.boxes] == [(dp,), (dp,)]


@pytest.mark.parametrize(("rank", "rows"), [(0, [0]), (1, [1]), (2, [])])
def test_a_cut_has_its_rows_of_what_is_whole(rank, rows):
    """Two rows over three ranks; the gradient is cut with them."""
    split = Axis("dp", (0, 1, 2), rank)
    module = Twice()
    module.second.weight.grad = torch.arange(6.0).view(2, 3)
    first, second = parameter_shards(
        module, lambda path: Sharing(split, Axis.single("replicas")), cut=True
    )
    assert first.module == "first"
    boxes = [(p.box.offsets[0], p.box.sizes[0]) for p, _ in first.boxes]
    assert boxes == [(row, 1) for row in rows]
    assert second.tensor.shape == (len(rows), 3)
    assert torch.equal(second.grad, module.second.weight.grad[rows])
    second.tensor.fill_(5.0)
    expected = torch.zeros(2, 3)
    expected[rows] = 5.0
    assert torch.equal(module.second.weight, expected)
