"""Initial weights: the same bits however they are cut, of the right size, none repeated."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megagrid.nn import init
from megagrid.nn.init import ONES, ZEROS, Init, initialise
from megagrid.nn.layout import Box, Layout, ParameterShard, Piece

SHAPE = (12, 7)
NORMAL = Init(std=0.5)


def filled(
    box: Box, *, name: str = "w", init: Init = NORMAL, seed: int = 1, padding: int = 0
) -> Tensor:
    """A local tensor that is that box of a matrix of `SHAPE`, with its initial weights."""
    piece = Piece(name, SHAPE, box, local_rows=box.sizes[0] + padding, init=init)
    layout = Layout((piece,), decay=True)
    tensor = torch.full(layout.local_shape, torch.nan)
    boxes = tuple(layout.rows(0, layout.local_shape[0]))
    initialise([ParameterShard(name, nn.Parameter(tensor), tensor, boxes, layout)], seed)
    return tensor


WHOLE = Box((0, 0), SHAPE)


@settings(deadline=None)
@given(st.data())
def test_any_box_has_the_bits_of_the_whole(data):
    first = [data.draw(st.integers(0, extent)) for extent in SHAPE]
    last = [data.draw(st.integers(a, extent)) for a, extent in zip(first, SHAPE, strict=True)]
    sizes = tuple(b - a for a, b in zip(first, last, strict=True))
    part = filled(Box(tuple(first), sizes))
    assert torch.equal(part, filled(WHOLE)[first[0] : last[0], first[1] : last[1]])


def test_filling_in_chunks_changes_nothing(monkeypatch):
    whole = filled(WHOLE)
    monkeypatch.setitem(init._ELEMENTS_AT_ONCE, "cpu", 2 * SHAPE[1])
    assert torch.equal(filled(WHOLE), whole)


def test_precision_rounds_the_same_numbers():
    box = Box((0, 0), SHAPE)
    piece = Piece("w", SHAPE, box, SHAPE[0], NORMAL)
    tensors = []
    for dtype in (torch.float64, torch.bfloat16):
        tensor = torch.empty(SHAPE, dtype=dtype)
        boxes = ((piece, slice(0, SHAPE[0])),)
        layout = Layout((piece,), decay=True)
        shard = ParameterShard("w", nn.Parameter(tensor), tensor, boxes, layout)
        initialise([shard], 1)
        tensors.append(tensor)
    assert torch.equal(tensors[0].float(), filled(WHOLE))
    assert torch.equal(tensors[0].bfloat16(), tensors[1])


@pytest.mark.parametrize("change", [{"name": "v"}, {"seed": 2}])
def test_another_name_or_seed_is_another_tensor(change):
    assert not (filled(WHOLE) == filled(WHOLE, **change)).any()


def test_constants_fill_their_box_and_padding_is_zero():
    assert filled(WHOLE, init=ONES, padding=2).tolist() == [[1.0] * 7] * 12 + [[0.0] * 7] * 2
    assert not filled(WHOLE, init=ZEROS).any()
    assert not filled(WHOLE, padding=3)[12:].any()


def test_normal_weights_have_the_stated_mean_and_deviation():
    shape = (400, 500)
    piece = Piece("w", shape, Box((0, 0), shape), shape[0], Init(std=0.02))
    tensor = torch.empty(shape)
    boxes, layout = ((piece, slice(0, 400)),), Layout((piece,), decay=True)
    shard = ParameterShard("w", nn.Parameter(tensor), tensor, boxes, layout)
    initialise([shard], 1)
    count = tensor.numel()
    # Five standard errors of the mean and of the deviation of that many normal numbers.
    assert abs(tensor.mean()) < 5 * 0.02 / sqrt(count)
    assert abs(tensor.std() - 0.02) < 5 * 0.02 / sqrt(2 * count)
    assert tensor.unique().numel() > 0.5 * count  # float32 of a sum of 16-bit numbers
