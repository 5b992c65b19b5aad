"""What a rank holds of the model and its optimizer, as rectangles of global tensors.

This is all that saving and loading know of a run: no tp, pp or dp appears beyond this file.

    rows of a parameter here     their pieces                     entries
    +--------+
    | ###### | 2..5 of 6         rows 2..3 of the stack are wq -> wq, box at (2, 0), sizes (2, h)
    +--------+                   rows 4..5 of the stack are wk -> wk, box at (0, 0), sizes (2, h)

A weight has its global name in a checkpoint, and each state that the optimizer keeps of it has that
name behind its own: `optimizer.exp_avg.<name>`. The count of updates is one number of the run and
belongs to the trainer's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megagrid.checkpoint.manifest import OPTIMIZER_PREFIX
from megagrid.nn.layout import Box, ParameterShard
from megagrid.optim.optimizer import Optimizer


@dataclass(frozen=True)
class Entry:
    """A rectangle of a global tensor that lies on this rank.

    Attributes:
        name: of the global tensor, in the checkpoint.
        shape: of the global tensor, without padding.
        box: the rectangle.
        tensor: its values, of shape `box.sizes`: a view, which loading writes into.
        is_written_here: whether this rank saves it; of all ranks that hold a box, one does.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    is_written_here: bool


def entries(shards: Sequence[ParameterShard], optimizer: Optimizer | None = None) -> list[Entry]:
    """The boxes of this rank's parameters, and of `optimizer`'s states if it is given, which may
    have fewer rows than lie here.

    Padding of the vocabulary is in none of them. An empty shard has none.
    """
    found = [entry for shard in shards for entry in _boxes("", shard, shard.tensor)]
    for state in optimizer.state_names if optimizer is not None else ():
        prefix = f"{OPTIMIZER_PREFIX}{state}."
        for shard, values in zip(optimizer.shards, optimizer.states(state), strict=True):
            if values is not None:
                found += _boxes(prefix, shard, values)
    return found


def _boxes(prefix: str, shard: ParameterShard, values: Tensor) -> Iterator[Entry]:
    """The boxes of `values`, the shard's weights or a state of their shape."""
    for piece, rows in shard.boxes:
        yield Entry(
            name=prefix + piece.name,
            shape=piece.shape,
            box=piece.box,
            tensor=values.detach()[rows],
            is_written_here=piece.is_counted_here,
        )
