"""Show where each rank of a recipe goes on a cluster, and which ranks it works with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from megagrid.config.arguments import add_recipe_arguments, load_recipe
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import GridError
from megagrid.grid.placement import AXES, Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster
from megagrid.terminal import Console

INNERMOST_FIRST = tuple(reversed(AXES))

MOST_RANKS = 100_000
"""A longer map is a typing mistake, and would fill the memory before it fills the screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid grid` takes."""
    add_recipe_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default 1)")
    parser.add_argument(
        "--gpus-per-node", type=int, required=True, metavar="G", help="ranks on each machine"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the rank map; refuse a grid whose tp groups cross nodes, or warn if that is allowed."""
    if arguments.nodes * arguments.gpus_per_node > MOST_RANKS:
        raise GridError(
            f"--nodes {arguments.nodes} x --gpus-per-node {arguments.gpus_per_node} is more than "
            f"{MOST_RANKS} ranks; state a smaller cluster"
        )
    cluster = Cluster.uniform(arguments.nodes, arguments.gpus_per_node)
    config = load_recipe(arguments)
    grid = placement(config, cluster.world_size)
    if not config.parallel.allow_tp_across_nodes:
        check_tp_inside_nodes(grid, cluster)
    elif crossing := grid.tp_groups_across_nodes(cluster):
        print(
            f"warning: {len(crossing)} of {len(grid.groups('tp'))} tp groups cross nodes, the "
            f"first is {{{span(crossing[0])}}}; parallel.allow_tp_across_nodes=true accepts it",
            file=sys.stderr,
        )
    check(config, cluster.world_size)
    sizes = " x ".join(f"{axis} {grid.size(axis)}" for axis in INNERMOST_FIRST)
    print(
        f"{grid.world_size} ranks = {sizes} (innermost first) on {cluster.num_nodes} nodes x "
        f"{arguments.gpus_per_node}\n"
    )
    console = Console(highlight=False)
    console.print(axis_table(grid, cluster, shard_size(config, grid, cluster)))
    console.print(rank_table(grid, cluster))
    return 0


def shard_size(config: Config, grid: Placement, cluster: Cluster) -> int | None:
    """Ranks that split parameters among them, where not all of dp do (or none); else None."""
    parallel = config.parallel
    if parallel.sharding_strategy != "HYBRID_SHARD":
        return None
    return parallel.shard_size or grid.shard_size_in_nodes(cluster)


def axis_table(grid: Placement, cluster: Cluster, shard_size: int | None = None) -> Table:
    """One row per axis: how many groups of what size, the first of them, and how far they reach."""
    table = Table("axis", "groups", "size", "first group", "reach", box=box.SIMPLE)
    rows = {axis: grid.groups(axis) for axis in INNERMOST_FIRST}
    if shard_size is not None:
        rows["dp_shard"], rows["dp_replicate"] = grid.shard_groups(shard_size)
    for axis, groups in rows.items():
        nodes = max(len({cluster.node_of_rank[rank] for rank in group}) for group in groups)
        reach = "inside a node" if nodes == 1 else f"over {nodes} nodes"
        table.add_row(axis, str(len(groups)), str(len(groups[0])), span(groups[0]), reach)
    return table


def rank_table(grid: Placement, cluster: Cluster) -> Table:
    """One row per rank: its node, its coordinate, and its group along each axis that has one."""
    axes = [axis for axis in INNERMOST_FIRST if grid.size(axis) > 1]
    groups = {axis: _group_of_rank(grid, axis) for axis in axes}
    table = Table("node", "rank", "coordinate", *(f"{axis} group" for axis in axes), box=box.SIMPLE)
    for rank, node in enumerate(cluster.node_of_rank):
        last_of_node = cluster.node_of_rank[rank + 1 : rank + 2] != (node,)
        table.add_row(
            str(node),
            str(rank),
            str(grid.coordinate(rank)),
            *(span(groups[axis][rank]) for axis in axes),
            end_section=last_of_node,
        )
    return table


def span(ranks: Sequence[int]) -> str:
    """Evenly spaced ranks, shortened: "0-3" for neighbours, "0,8,..,56" for many far apart."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if stride == 1 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
    return ",".join(map(str, ranks))


def _group_of_rank(grid: Placement, axis: str) -> dict[int, tuple[int, ...]]:
    return {rank: group for group in grid.groups(axis) for rank in group}
