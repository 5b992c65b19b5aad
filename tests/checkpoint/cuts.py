"""A small model cut for any grid by hand, as `megagrid.nn` would cut it, without any layer.

Two layers of 8 heads and 2 key/value heads of width 2, hidden size 8, 61 words padded to 64, tied
embeddings. Values are a function of the global name and index, so each local tensor has one right
content.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product

import torch

from megagrid.checkpoint import Entry, entries
from megagrid.config.schema import OptimizerConfig
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Box, Layout, ParameterShard, Piece
from megagrid.optim.adamw import AdamW

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WORDS, PADDED = 2, 8, 8, 2, 2, 61, 64


@dataclass(frozen=True)
class GridShape:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    shards: bool = True
    """Whether dp splits parameters (FULL_SHARD) or repeats them (NO_SHARD)."""

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}{'' if self.shards else 'r'}"


@dataclass(frozen=True)
class RankState:
    """What one rank of a grid holds."""

    shards: list[ParameterShard]
    optimizer: AdamW

    @property
    def entries(self) -> list[Entry]:
        return entries(self.shards, self.optimizer)

    def fill(self) -> None:
        """Give every entry its right values."""
        for entry in self.entries:
            entry.tensor.copy_(right_values(entry))

    def is_right(self) -> bool:
        """Whether every entry has its right values, bit by bit, and padding is zero."""
        values = [shard.tensor for shard in self.shards]
        boxes = [shard.boxes for shard in self.shards]
        for state in self.optimizer.state_names:
            values += self.optimizer.states(state)
        for tensor, parts in zip(values, boxes * 3, strict=True):
            outside = torch.ones_like(tensor)
            for _, rows in parts:
                outside[rows] = 0
            if torch.count_nonzero(tensor * outside):
                return False
        return all(torch.equal(entry.tensor, right_values(entry)) for entry in self.entries)


def right_values(entry: Entry) -> torch.Tensor:
    whole = global_tensor(entry.name, entry.shape)
    for dim, (offset, size) in enumerate(zip(entry.box.offsets, entry.box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def global_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """No two values of the model are equal."""
    salt = int.from_bytes(name.encode(), "little") % 997
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) * 1024 + salt + 1


def rank_states(grid: GridShape) -> list[RankState]:
    """Every rank of `grid`, in rank order (tp innermost, then dp, then pp), all values zero."""
    coordinates = product(range(grid.pp), range(grid.dp), range(grid.tp))
    return [rank_state(grid, tp, pp, dp) for pp, dp, tp in coordinates]


def rank_state(grid: GridShape, tp: int, pp: int, dp: int) -> RankState:
    shards = []
    for name, layout in _stage(grid, tp, pp).items():
        rows = layout.local_shape[0]
        chunk = -(-rows // grid.dp) if grid.shards else rows
        start = min(rows, dp * chunk) if grid.shards else 0
        if not grid.shards:
            layout = layout.replicated(_axis("dp", grid.dp, dp))
        tensor = torch.zeros(min(rows, start + chunk) - start, *layout.local_shape[1:])
        boxes = tuple(layout.rows(start, start + tensor.shape[0]))
        parameter = torch.nn.Parameter(tensor)
        shards.append(ParameterShard(name, parameter, tensor, boxes, layout))
    return RankState(shards, AdamW(shards, OptimizerConfig()))


def _stage(grid: GridShape, tp: int, pp: int) -> dict[str, Layout]:
    stage: dict[str, Layout] = {}
    if pp in (0, grid.pp - 1):
        embedding = _axis("embedding", 2 if grid.pp > 1 else 1, min(pp, 1))
        stage["embedding"] = Layout((_vocabulary(grid.tp, tp, embedding),), decay=True)
    for layer in range(pp * LAYERS // grid.pp, (pp + 1) * LAYERS // grid.pp):
        path = f"layers.{layer}"
        stage[f"{path}.norm"] = Layout(
            (_piece(f"{path}.norm.weight", (HIDDEN,), replicas=(_axis("tp", grid.tp, tp),)),),
            decay=False,
        )
        stage[f"{path}.qkv"] = Layout(_qkv(path, grid.tp, tp), decay=True)
        stage[f"{path}.wo"] = Layout(
            (_piece(f"{path}.wo.weight", (HIDDEN, HEADS * HEAD_DIM), 1, grid.tp, tp),), decay=True
        )
    return stage


def _vocabulary(size: int, index: int, embedding: Axis) -> Piece:
    rows = PADDED // size
    box = Box((index * rows, 0), (min(WORDS - index * rows, rows), HIDDEN))
    return Piece("embedding.weight", (WORDS, HIDDEN), box, rows, "zeros", (embedding,))


def _qkv(path: str, size: int, index: int) -> tuple[Piece, ...]:
    """Query rows, then key rows, then value rows; ranks share a key/value head if tp is larger."""
    copies = max(1, size // KV_HEADS)
    kv = _axis("kv", copies, index % copies)
    shape = (KV_HEADS * HEAD_DIM, HIDDEN)
    return (
        _piece(f"{path}.wq.weight", (HEADS * HEAD_DIM, HIDDEN), 0, size, index),
        *(
            _piece(f"{path}.{w}.weight", shape, 0, size // copies, index // copies, (kv,))
            for w in ("wk", "wv")
        ),
    )


def _piece(
    name: str,
    shape: tuple[int, ...],
    dim: int = 0,
    size: int = 1,
    index: int = 0,
    replicas: tuple[Axis, ...] = (),
) -> Piece:
    """Part `index` of `size` equal ones along `dim`."""
    part = shape[dim] // size
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = index * part, part
    return Piece(name, shape, Box(tuple(offsets), tuple(sizes)), sizes[0], "zeros", replicas)


def _axis(name: str, size: int, index: int) -> Axis:
    return Axis(name, tuple(range(size)), index)


def random_cut(rng: random.Random, box: Box, depth: int) -> list[Box]:
    """`box` in up to 2^depth rectangles by cuts across it at random places."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if depth == 0 or not dims:
        return [box]
    dim = rng.choice(dims)
    at = rng.randrange(1, box.sizes[dim])
    halves = []
    for start, size in ((0, at), (at, box.sizes[dim] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, size
        halves += random_cut(rng, Box(tuple(offsets), tuple(sizes)), depth - 1)
    return halves


def slices_of(box: Box) -> tuple[slice, ...]:
    """Where `box` lies in its global tensor."""
    bounds = zip(box.offsets, box.sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in bounds)
