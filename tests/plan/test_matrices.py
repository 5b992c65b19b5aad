"""Boxes of matrices: independent of layers that state them, and of what the ranks really hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrid.grid.grid import build_grid
from megagrid.grid.placement import Placement
from megagrid.nn.layout import parameter_shards
from megagrid.optim.muon import matrices as matrices_of
from megagrid.pipeline.program import training_program
from megagrid.plan.matrices import Holders, Matrix, deal, splits
from megagrid.plan.parameters import ModelShare
from megagrid.train.build import _modules
from tests.plan.test_comm import run


@st.composite
def placed(draw) -> tuple[Matrix, Holders]:
    """A matrix somewhere in a stack, cut over tp one way or the other, and over dp."""
    copies, parts = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4), (4, 1)]))
    dp = draw(st.integers(1, 4))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    by_rows = draw(st.booleans())
    shape = (rows * parts, columns) if by_rows else (rows, columns * parts)
    above, below = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    matrix = Matrix(shape, (parts, 1) if by_rows else (1, parts), above, above + rows + below)
    # In one cut, in as many as there are ranks, or in fewer that are there several times.
    cuts = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
    return replace(matrix, cuts=cuts), Holders(dp, copies * parts)


@given(placed())
def test_those_who_send_cover_a_matrix_once(case):
    matrix, holders = case
    covered = np.zeros(matrix.shape, int)
    for rank in range(holders.size):
        rows, columns = matrix.box(holders, rank)
        if matrix.sent(holders, rank, gather=True):
            covered[rows.start : rows.stop, columns.start : columns.stop] += 1
    assert (covered == 1).all()


@given(st.lists(placed(), min_size=1, max_size=9))
def test_what_is_sent_is_what_is_received_and_every_matrix_has_one_owner(cases):
    holders = cases[0][1]
    matrices = [matrix for matrix, other in cases if other == holders]
    buckets = deal(matrices, holders)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(len(matrices)))
    for numbers in buckets:
        assert len(numbers) <= holders.size
        bucket = [matrices[n] for n in numbers]
        for gather in (True, False):
            of_ranks = [splits(bucket, holders, r, gather=gather) for r in range(holders.size)]
            shares, parts = (np.array(side) for side in zip(*of_ranks, strict=True))
            assert (shares == parts.T).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_plans_matrices_are_those_that_layers_state(family, tp):
    placement = Placement(tp=tp)
    config = run(placement, family)
    for rank in range(tp):
        grid = build_grid(placement, rank, "meta", config.model.num_kv_heads, has_groups=False)
        (stage,) = _modules(config, grid, training_program(config, placement)).values()
        hidden = [shard for shard in parameter_shards(stage) if shard.hidden]
        stated = [
            matrix for shard in hidden for matrix in matrices_of(shard.layout, tp, shard.split)
        ]
        layer = ModelShare(config.model, tp, rank, sequence_parallel=False).layer()
        planned = [matrix for parameter in layer for matrix in parameter.matrices]
        assert stated == planned * config.model.num_layers
        holders = Holders(tp=tp)
        boxes = [piece.box for shard in hidden for piece in shard.layout.pieces]
        for matrix, box in zip(stated, boxes, strict=True):
            rows, columns = matrix.box(holders, rank)
            assert (rows.start, columns.start) == box.offsets
            assert (len(rows), len(columns)) == box.sizes
