"""Where each rank of the world sits in the grid. Pure arithmetic, no torch.

Ranks are the cells of an array of shape (pp, dp, cp, tp), counted with tp innermost, so that the
tp ranks that talk in every layer are neighbours in one node, and the pp ranks, which talk once a
microbatch, are farthest apart:

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

    tp 2, dp 2, pp 2                 dp 0      dp 1
                             pp 0    0 1       2 3
                             pp 1    4 5       6 7
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megagrid.errors import GridError
from megagrid.grid.topology import Cluster

AXES = ("pp", "dp", "cp", "tp")
"""Names of the axes, outermost first."""


class Coordinate(NamedTuple):
    """A rank's place along each axis, outermost first."""

    pp: int
    dp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} dp{self.dp} cp{self.cp} tp{self.tp}"


@dataclass(frozen=True)
class Placement:
    """Sizes of the axes, and the two-way map between ranks and coordinates.

    Attributes:
        pp, dp, cp, tp: ranks along each axis.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def for_world(cls, world_size: int, *, tp: int, pp: int, cp: int, dp: int | None) -> Placement:
        """The grid that fills `world_size` ranks; `dp` None takes what the other axes leave."""
        others = tp * pp * cp
        if dp is None:
            if world_size % others:
                raise GridError(
                    f"{world_size} ranks can't be divided by tensor_parallel_size={tp} x "
                    f"pipeline_parallel_size={pp} x context_parallel_size={cp} = {others}; "
                    f"start a multiple of {others} ranks"
                )
            dp = world_size // others
        if others * dp != world_size:
            raise GridError(
                f"tensor_parallel_size={tp} x pipeline_parallel_size={pp} x "
                f"context_parallel_size={cp} x data_parallel_size={dp} = {others * dp} ranks, but "
                f"{world_size} were started; start {others * dp}, or change the sizes"
            )
        return cls(pp=pp, dp=dp, cp=cp, tp=tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def rank(self, coordinate: Coordinate) -> int:
        rank = 0
        for axis, index in zip(AXES, coordinate, strict=True):
            rank = rank * self.size(axis) + index
        return rank

    def coordinate(self, rank: int) -> Coordinate:
        indices = []
        for axis in reversed(AXES):
            rank, index = divmod(rank, self.size(axis))
            indices.append(index)
        return Coordinate(*reversed(indices))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axes`, each in rank order.

        Every rank is in exactly one of them. The order of the list is the same on every rank,
        which is what creating process groups needs.
        """
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.coordinate(rank)
            rest = tuple(getattr(coordinate, a) for a in AXES if a not in axes)
            members.setdefault(rest, []).append(rank)
        return [tuple(ranks) for ranks in members.values()]

    def tp_groups_across_nodes(self, cluster: Cluster) -> list[tuple[int, ...]]:
        """The tp groups whose ranks aren't all on one node."""
        nodes = cluster.node_of_rank
        return [group for group in self.groups("tp") if len({nodes[rank] for rank in group}) > 1]

    def shard_groups(self, shard_size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The groups of ranks that split parameters, `shard_size` neighbours of those with the
        same, and the groups of ranks that then hold the same rows."""
        alike = self.groups("dp", "cp")
        starts = range(0, len(alike[0]), shard_size)
        split = [ranks[start : start + shard_size] for ranks in alike for start in starts]
        return split, [ranks[i::shard_size] for ranks in alike for i in range(shard_size)]

    def shard_size_in_nodes(self, cluster: Cluster) -> int:
        """How many of the ranks with the same parameters share a node.

        Raises:
            GridError: they aren't equally many everywhere; names the sizes that could be stated.
        """
        nodes, sizes = cluster.node_of_rank, set()
        for group in self.groups("dp", "cp"):
            # Ranks are numbered node by node: those of one lie together.
            runs = [len(list(run)) for _, run in groupby(group, key=lambda rank: nodes[rank])]
            sizes |= set(runs)
            if len(sizes) > 1:
                divisors = [n for n in range(1, len(group) + 1) if len(group) % n == 0]
                raise GridError(
                    'parallel.sharding_strategy="HYBRID_SHARD" shards inside nodes, but the ranks '
                    f"of a dp group that share one are {' or '.join(map(str, sorted(sizes)))}; "
                    f"state parallel.shard_size, one of {', '.join(map(str, divisors))}"
                )
        return sizes.pop()


def axis_groups(
    placement: Placement,
    *,
    num_kv_heads: int,
    ends: tuple[int, int],
    shard_size: int | None = None,
    reshard_size: int | None = None,
) -> dict[str, list[tuple[int, ...]]]:
    """The groups of ranks along every axis by name, as `megagrid.grid.grid.Grid` describes them.

    Args:
        num_kv_heads: of the model; below tp it decides which ranks hold the same key/value head.
        ends: the pp ranks of the first and the last stage, as the schedule places them.
        shard_size: ranks of `dp_shard`; None: all of dp_cp.
        reshard_size: ranks of `dp_reshard`; None: nothing is split so.
    """
    copies = max(1, placement.tp // num_kv_heads)
    shards, replicas = placement.shard_groups(shard_size or placement.dp * placement.cp)
    first, last = ends
    pipelines, tp = placement.groups("pp"), placement.groups("tp")
    return {
        "tp": tp,
        "cp": placement.groups("cp"),
        "dp": placement.groups("dp"),
        "pp": pipelines,
        "dp_cp": placement.groups("dp", "cp"),
        "dp_shard": shards,
        "dp_replicate": replicas,
        "dp_reshard": placement.shard_groups(reshard_size or 1)[0],
        "stage": placement.groups("dp", "cp", "tp"),
        "world": placement.groups(*AXES),
        "embedding": [(p[first], p[last]) for p in pipelines if p[first] != p[last]],
        "kv": [group[i : i + copies] for group in tp for i in range(0, len(group), copies)],
    }


def check_tp_inside_nodes(placement: Placement, cluster: Cluster) -> None:
    """Refuse a grid in which a tp group crosses nodes; the error names a layout that doesn't.

    Raises:
        GridError: with the first such group and the largest tensor_parallel_size that fits.
    """
    crossing = placement.tp_groups_across_nodes(cluster)
    if not crossing:
        return
    names = dict.fromkeys(cluster.node(rank).name for rank in crossing[0])
    fitting = [
        tp
        for tp in range(1, placement.tp)
        if placement.tp % tp == 0
        and not Placement(
            pp=placement.pp, dp=placement.dp * placement.tp // tp, cp=placement.cp, tp=tp
        ).tp_groups_across_nodes(cluster)
    ]
    raise GridError(
        f"parallel.tensor_parallel_size={placement.tp} puts tp group "
        f"{'{' + ','.join(map(str, crossing[0])) + '}'} on nodes {' and '.join(names)}; with "
        f"{cluster.smallest_node} ranks per node use parallel.tensor_parallel_size={fitting[-1]} "
        f"(and data_parallel_size={placement.dp * placement.tp // fitting[-1]}), start a multiple "
        f"of {placement.tp} ranks per node, or accept slow tensor parallelism with "
        "parallel.allow_tp_across_nodes=true"
    )
