"""Copies of a rank's boxes in host memory: what is saved while training changes the originals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megagrid.checkpoint.layout import Entry
from megagrid.errors import CheckpointError


class HostBuffers:
    """Buffers of the boxes that this rank writes, made by the first copy and used by all.

    They take as much host memory as those boxes take on the device: beside a run on CPUs, as much
    again as its weights and optimizer states.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, entries: Sequence[Entry]) -> list[Entry]:
        """`entries`, with the values that they have now in buffers; until the next copy these stay.

        What another rank writes is passed on as it is: a save needs no more than its name.

        Raises:
            CheckpointError: the host has no memory for them.
        """
        mine = [entry for entry in entries if entry.is_written_here and entry.box.numel]
        with _queue_of_copies(mine):
            copies = {id(entry): self._copy(entry) for entry in mine}
        return [copies.get(id(entry), entry) for entry in entries]

    def _copy(self, entry: Entry) -> Entry:
        place = entry.name, entry.box.offsets
        if place not in self._buffers:
            # Only to pinned memory does a device copy without the host's help.
            is_pinned = entry.tensor.device.type != "cpu"
            try:
                self._buffers[place] = torch.empty(
                    entry.tensor.shape, dtype=entry.tensor.dtype, pin_memory=is_pinned
                )
            except (RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"no host memory for a copy of {entry.name} ({entry.tensor.nbytes / 1e9:,.3g} "
                    "GB), which a save behind the training writes: "
                    f"{str(error).splitlines()[0] or 'it is full'}; set "
                    "checkpoint.async_save=false, which saves without copies"
                ) from error
        buffer = self._buffers[place]
        buffer.copy_(entry.tensor, non_blocking=True)
        return dataclasses.replace(entry, tensor=buffer)


@contextmanager
def _queue_of_copies(entries: Sequence[Entry]) -> Iterator[None]:
    """Copies from a device that are started in the block are done at its end.

    They have a stream of their own, so that they wait for the update of the weights alone, and
    nothing that is started later waits for them.
    """
    device = entries[0].tensor.device if entries else torch.device("cpu")
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield
    stream.synchronize()
