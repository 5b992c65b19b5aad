"""The grid as one rank sees it: axes with their process groups, built once and passed on.

A layer is given an `Axis`, never the `Grid`. An axis of size 1 has no group and is in no way
special: the collectives of `megagrid.comm` do nothing along it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from megagrid.grid.placement import Coordinate, Placement, axis_groups


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

    @classmethod
    def of_group(cls, name: str, group_name: str) -> Axis:
        """The axis whose process group has that name."""
        group = _resolve_process_group(group_name)
        return cls(name, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


@dataclass(frozen=True)
class Grid:
    """One rank's view of the run's ranks.

    Attributes:
        placement: sizes of the axes, and the map from ranks to coordinates.
        rank: this rank's global number.
        device: where this rank computes.
        tp, cp, dp, pp: the axes of the grid.
        dp_cp: dp and cp together, the ranks with the same parameters: those that fully_shard splits
            them over, and whose tokens make up a step. The same as dp where cp is 1.
        dp_shard: of dp_cp, the neighbours that split parameters among them where not all do; and
        dp_replicate: those with the same place in other such groups, which hold the same rows.
        dp_reshard: of the ranks that split parameters, the neighbours that split gathered ones
            between a forward and its backward.
        world: all ranks.
        host: all ranks again, for what lies in the hosts' memory. It has a group of its own, so
            that a checkpoint can be written behind the training, which uses the others.
        stage: dp, cp and tp together, the ranks with this rank's stages.
        embedding: the ranks of this rank's pipeline with its first and its last stage, which share
            a tied embedding; of size 1 on the others, and where one rank has both.
        kv: the tp ranks that hold the same key/value head, where tp exceeds their number.
    """

    placement: Placement
    rank: int
    device: torch.device
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    dp_shard: Axis
    dp_replicate: Axis
    dp_reshard: Axis
    stage: Axis
    world: Axis
    embedding: Axis
    kv: Axis
    host: Axis

    @property
    def coordinate(self) -> Coordinate:
        return self.placement.coordinate(self.rank)

    @property
    def axes(self) -> dict[str, Axis]:
        """Every axis by name."""
        axes = (self.tp, self.cp, self.dp, self.pp, self.dp_cp, self.stage, self.world)
        axes += (self.embedding, self.kv, self.host)
        axes += (self.dp_shard, self.dp_replicate, self.dp_reshard)
        return {axis.name: axis for axis in axes}


def build_grid(
    placement: Placement,
    rank: int,
    device: torch.device | str,
    num_kv_heads: int,
    ends: tuple[int, int] = (0, -1),
    *,
    shard_size: int | None = None,
    reshard_size: int | None = None,
    has_groups: bool = True,
    timeout: timedelta | None = None,
    host_backend: str = "gloo",
) -> Grid:
    """Make every process group of the run, in one fixed order, and this rank's view of them.

    Collective over all ranks. The default process group must exist if there is more than one.

    Args:
        num_kv_heads: of the model; below tp it decides which ranks hold the same key/value head.
        ends: the pp ranks of the first and the last stage, as the schedule places them.
        shard_size: ranks of `dp_shard`; None: all of dp_cp, which is then that axis itself.
        reshard_size: ranks of `dp_reshard`; None: nothing is split so.
        has_groups: make them. Without, the grid can be looked at, by one process for any rank, but
            nothing communicates along it.
        timeout: of a collective of these groups, which don't take over the default group's; None:
            torch's own, half an hour on gloo.
        host_backend: of the group for what lies in the hosts' memory.
    """

    def axis(name: str, groups: Iterable[tuple[int, ...]], backend: str | None = None) -> Axis:
        # new_group is collective over the world: every rank makes every group, its own or not.
        mine = Axis.single(name, rank)
        for ranks in groups:
            group = make_group(name, ranks, backend) if len(ranks) > 1 else None
            if rank in ranks:
                mine = Axis(name, ranks, ranks.index(rank), group)
        return mine

    def make_group(
        name: str, ranks: tuple[int, ...], backend: str | None
    ) -> dist.ProcessGroup | None:
        if not has_groups:
            return None
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)

    groups = axis_groups(
        placement,
        num_kv_heads=num_kv_heads,
        ends=ends,
        shard_size=shard_size,
        reshard_size=reshard_size,
    )
    (everyone,) = groups["world"]
    tp, dp = axis("tp", groups["tp"]), axis("dp", groups["dp"])
    dp_cp = dp if placement.cp == 1 else axis("dp_cp", groups["dp_cp"])
    is_all = shard_size in (None, dp_cp.size)
    return Grid(
        placement=placement,
        rank=rank,
        device=torch.device(device),
        tp=tp,
        cp=axis("cp", groups["cp"]),
        dp=dp,
        pp=axis("pp", groups["pp"]),
        dp_cp=dp_cp,
        dp_shard=dp_cp if is_all else axis("dp_shard", groups["dp_shard"]),
        dp_replicate=axis("dp_replicate", groups["dp_replicate"]),
        dp_reshard=axis("dp_reshard", groups["dp_reshard"]),
        stage=axis("stage", groups["stage"])
        if tp.size > 1 and dp_cp.size > 1
        else max(tp, dp_cp, key=lambda axis: axis.size),
        world=Axis(
            "world", everyone, rank, dist.group.WORLD if has_groups and len(everyone) > 1 else None
        ),
        embedding=axis("embedding", groups["embedding"]),
        kv=axis("kv", groups["kv"]),
        host=axis("host", [everyone], backend=host_backend),
    )
