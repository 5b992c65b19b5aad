"""The grid as one rank sees it: axes with their process groups, built once and passed on.

A layer is given an `Axis`, never the `Grid`. An axis of size 1 has no group and is in no way
special: the collectives of `megagrid.comm` do nothing along it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megagrid.grid.placement import Coordinate, Placement


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank works with in one kind of parallelism.

    Attributes:
        name: "tp", "dp", … as in the ledger and in errors.
        ranks: global ranks along the axis, in order.
        rank: this rank's index in `ranks`.
        group: the process group; None where the axis has one rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        """An axis along which this rank (global number `rank`) is alone."""
        return cls(name, (rank,), 0)


@dataclass(frozen=True)
class Grid:
    """One rank's view of the run's ranks.

    Attributes:
        placement: sizes of the axes and the map from ranks to coordinates.
        rank: this rank's global number.
        device: where this rank computes.
        tp, cp, dp, pp: the axes.
        embedding: first and last stage of this rank's pipeline, which share a tied embedding; of
            size 1 on the ranks between.
        world: all ranks.
        replicate_mesh: (dp, 1) mesh and `shard_mesh`: (dp,) mesh, what fully_shard is given; None
            without process groups.
    """

    placement: Placement
    rank: int
    device: torch.device
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    embedding: Axis
    world: Axis
    kv: Axis
    shard_mesh: DeviceMesh | None = None
    replicate_mesh: DeviceMesh | None = None

    @property
    def coordinate(self) -> Coordinate:
        return self.placement.coordinate(self.rank)

    @property
    def axes(self) -> dict[str, Axis]:
        """Every axis by name."""
        axes = (self.tp, self.cp, self.dp, self.pp, self.embedding, self.kv, self.world)
        return {axis.name: axis for axis in axes}


def build_grid(placement: Placement, rank: int, device: torch.device, num_kv_heads: int) -> Grid:
    """Make every process group of the run, in one fixed order, and this rank's view of them.

    Args:
        num_kv_heads: where tp is larger, groups of tp / num_kv_heads ranks hold the same key/value
            head (axis "kv").

    The default process group must exist if there is more than one rank.
    """

    def axis(name: str, groups: Iterable[tuple[int, ...]]) -> Axis:
        mine = Axis.single(name, rank)
        for ranks in groups:
            group = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else None
            if rank in ranks:
                mine = Axis(name, tuple(ranks), ranks.index(rank), group)
        return mine

    pipelines = placement.groups("pp")
    copies = max(1, placement.tp // num_kv_heads)
    kv_groups = [
        ranks[i : i + copies]
        for ranks in placement.groups("tp")
        for i in range(0, placement.tp, copies)
    ]
    multiple = placement.world_size > 1
    everyone = tuple(range(placement.world_size))
    tp, cp, dp, pp = (axis(name, placement.groups(name)) for name in ("tp", "cp", "dp", "pp"))
    shard_mesh = replicate_mesh = None
    if multiple:
        shard_mesh, replicate_mesh = _dp_meshes(placement, rank, device, dp)
    return Grid(
        placement=placement,
        rank=rank,
        device=device,
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        embedding=axis("embedding", [(ranks[0], ranks[-1]) for ranks in pipelines if len(ranks) > 1]),
        kv=axis("kv", kv_groups),
        world=Axis("world", everyone, rank, dist.group.WORLD if multiple else None),
        shard_mesh=shard_mesh,
        replicate_mesh=replicate_mesh,
    )
