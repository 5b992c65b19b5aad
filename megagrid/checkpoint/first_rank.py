"""Reading by the first rank alone, which sends every box to all: for disks that many slow down.

    first rank   read box 0 | send          | read box 1 | send          | …
    others                  | take a slice               | take a slice  | …

A box is one that was saved, whole, so a rank holds no more than the largest of them beside its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megagrid.checkpoint.manifest import SavedBox
from megagrid.checkpoint.storage import DTYPES, SafetensorsReader, fill, open_tensors
from megagrid.checkpoint.together import on_first_rank
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Axis


@dataclass(frozen=True)
class _Box:
    """A box of the tensor `name`."""

    name: str
    dtype: torch.dtype
    saved: SavedBox


class FirstRankReader(SafetensorsReader):
    """Takes note of what its rank wants to read; `share` then fills it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # Not here: a rank that fails while it plans would leave the others in a broadcast. When all
        # have come to the end of this, all have a plan.
        self._plan, self._planner = plan, planner
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def share(self, world: Axis, names: Collection[str]) -> None:
        """Read boxes one by one, send each to all ranks of `world`, and fill what it is part of.

        Args:
            names: of the tensors that any rank wants some of, the same on all ranks.

        Raises:
            CheckpointError: on every rank: a file is missing or damaged.
        """
        wanted = defaultdict(list)
        for item in self._plan.items:
            wanted[item.storage_index.fqn, tuple(item.storage_index.offset)].append(item)
        boxes = self._boxes(names)
        values = self._read(boxes)  # begun on the first rank alone
        for box in boxes:
            received = _send_next(values, box, world)
            for item in wanted[box.name, box.saved.offsets]:
                fill(self._planner, item, received)

    def _boxes(self, names: Collection[str]) -> list[_Box]:
        """In the order of files, so that each is opened once."""
        boxes = [
            _Box(name, DTYPES[self.manifest.tensors[name].dtype], saved)
            for name in sorted(names)
            for saved in self.manifest.tensors[name].boxes
        ]
        return sorted(boxes, key=lambda box: box.saved.file)

    def _read(self, boxes: list[_Box]) -> Iterator[Tensor]:
        for name, group in groupby(boxes, key=lambda box: box.saved.file):
            path = self.folder / name
            with open_tensors(path) as file:
                for box in group:
                    values = file.get_tensor(box.name)
                    if (values.shape, values.dtype) != (box.saved.sizes, box.dtype):
                        raise CheckpointError(
                            f"{path} is damaged: {box.name} isn't what the manifest says"
                        )
                    yield values


def _send_next(values: Iterator[Tensor], box: _Box, world: Axis) -> Tensor:
    """The next of the first rank's `values`, which is of `box`, on all ranks; or why there is none.

    Each is announced by a byte: a rank can't be told amid a broadcast that nothing will come.
    """
    sent, failure = None, None
    if world.rank == 0:
        try:
            sent = next(values)
        except Exception as error:
            failure = error
    else:
        sent = torch.empty(box.saved.sizes, dtype=box.dtype)
    is_there = torch.tensor([sent is not None], dtype=torch.uint8)
    dist.broadcast(is_there, src=world.ranks[0], group=world.group)
    if not is_there:
        on_first_rank(lambda: _raise(failure), world)
    # As bytes, since not every dtype can be sent.
    message = sent.contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(message, src=world.ranks[0], group=world.group)
    return sent


def _raise(failure: Exception) -> NoReturn:
    raise failure
