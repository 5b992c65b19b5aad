"""Copies in host memory hold what the boxes held, in the same memory every time."""

from __future__ import annotations

import pytest
import torch

from megagrid.checkpoint import Entry
from megagrid.checkpoint.buffers import HostBuffers
from megagrid.errors import CheckpointError
from megagrid.nn.layout import Box


def boxes(values: torch.Tensor) -> list[Entry]:
    """A row that this rank writes, one that another does, and an empty box."""
    shape = tuple(values.shape)
    return [
        Entry("w", shape, Box((0, 0), (1, shape[1])), values[:1], True),
        Entry("w", shape, Box((1, 0), (1, shape[1])), values[1:2], False),
        Entry("w", shape, Box((2, 0), (0, shape[1])), values[2:2], True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_copy_stays_when_the_original_changes(dtype):
    values = torch.randn(2, 5, dtype=dtype)
    expected = values.clone()
    entries = boxes(values)
    mine, others, empty = HostBuffers().copy(entries)
    values.zero_()
    assert torch.equal(mine.tensor, expected[:1])
    assert (mine.name, mine.shape, mine.box) == ("w", (2, 5), entries[0].box)
    assert others is entries[1] and empty is entries[2]


def test_every_copy_uses_the_memory_of_the_first():
    buffers = HostBuffers()
    first, second = (buffers.copy(boxes(torch.full((2, 5), n)))[0] for n in (1.0, 2.0))
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    assert second.tensor.eq(2.0).all()


def test_a_host_without_room_for_copies_is_told_to_save_without_them():
    vast = torch.empty(1).expand(1, 2**53)
    with pytest.raises(CheckpointError) as told:
        HostBuffers().copy([Entry("w", (1, 2**53), Box((0, 0), (1, 2**53)), vast, True)])
    assert "no host memory for a copy of w (3.6e+07 GB)" in str(told.value)
    assert "set checkpoint.async_save=false" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.gpu
def test_copies_of_a_device_are_pinned_and_complete():
    """While the device is busy, before and after."""
    device = torch.accelerator.current_accelerator()
    values = torch.zeros(2, 1 << 22, device=device)
    buffers = HostBuffers()
    for number in (1, 2, 3):
        values += 1
        (mine, *_) = buffers.copy(boxes(values))
        values.mul_(1)
        assert mine.tensor.is_pinned()
        assert mine.tensor.eq(number).all()
