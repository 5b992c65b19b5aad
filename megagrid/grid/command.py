"""Show where each rank of a recipe goes on a cluster, and which ranks it works with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from megagrid.config.arguments import add_recipe_arguments, load_recipe
from megagrid.config.dump import toml_value
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import GridError
from megagrid.grid.nodelist import node_names, tasks_per_node
from megagrid.grid.placement import AXES, Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster, Node, load_topology, numbered, switches_of
from megagrid.plan.wire import LIBRARIES, off_node
from megagrid.terminal import Console, size_text

INNERMOST_FIRST = tuple(reversed(AXES))

MOST_RANKS = 100_000
"""A longer map is a typing mistake, and would fill the memory before it fills the screen."""

MOST_RANKS_PRICED = 2048
"""Each rank's messages are added up, some 500 ranks a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid grid` takes."""
    add_recipe_arguments(parser)
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (default 1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="G", help="ranks on each machine")
    parser.add_argument(
        "--hosts", metavar="LIST", help="the machines by name, as node[01-03,07],gpu1"
    )
    parser.add_argument(
        "--tasks-per-node", metavar="COUNTS", help="ranks on each of them, as 2(x3),1"
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="parallel.topology_file=FILE: the switches that they hang on",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the rank map; refuse a grid whose tp groups cross nodes, or warn if that is allowed."""
    if arguments.topology is not None:
        topology_file = f"parallel.topology_file={toml_value(arguments.topology)}"
        arguments.overrides = [*arguments.overrides, topology_file]
    config = load_recipe(arguments)
    nodes = _nodes(arguments, config.parallel.topology_file)
    order, cluster = numbered(nodes, config.parallel.rank_order)
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
    each = arguments.tasks_per_node or arguments.gpus_per_node
    print(
        f"{grid.world_size} ranks = {sizes} (innermost first) on {cluster.num_nodes} nodes x {each}"
    )
    if order != sorted(order):
        print("ranks are numbered so that nodes of a switch are neighbours")
    print()
    console = Console(highlight=False)
    shards = shard_size(config, grid, cluster)
    console.print(axis_table(grid, cluster, shards))
    if cluster.num_nodes > 1 and cluster.world_size <= MOST_RANKS_PRICED:
        print(f"{traffic(config, grid, cluster, shards)}\n")
    console.print(rank_table(grid, cluster))
    return 0


def _nodes(arguments: argparse.Namespace, topology_file: str | None) -> list[Node]:
    """The node of each rank, as a launcher numbers ranks: node by node.

    Raises:
        GridError: the options tell of no cluster, or of one that is too large to show.
    """
    if arguments.hosts is None:
        if arguments.gpus_per_node is None or arguments.tasks_per_node is not None:
            raise GridError("state --gpus-per-node G, or --hosts LIST with --tasks-per-node COUNTS")
        if topology_file is not None:
            raise GridError(f"topology file {topology_file} tells of nodes by name; state --hosts")
        count = 1 if arguments.nodes is None else arguments.nodes
        _check_size(count * arguments.gpus_per_node)
        cluster = Cluster.uniform(count, arguments.gpus_per_node)
        return [cluster.node(rank) for rank in range(cluster.world_size)]
    if (arguments.gpus_per_node is None) == (arguments.tasks_per_node is None):
        raise GridError("--hosts needs one of --tasks-per-node COUNTS and --gpus-per-node G")
    hosts = node_names(arguments.hosts)
    if arguments.nodes not in (None, len(hosts)):
        raise GridError(
            f"--hosts {arguments.hosts} are {len(hosts)} nodes, --nodes says {arguments.nodes}; "
            "leave it out"
        )
    counts = tasks_per_node(arguments.tasks_per_node or str(arguments.gpus_per_node))
    if len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        raise GridError(
            f"--hosts {arguments.hosts} are {len(hosts)} nodes, but --tasks-per-node "
            f"{arguments.tasks_per_node} of {len(counts)}"
        )
    _check_size(sum(counts))
    topology = load_topology(topology_file) if topology_file is not None else None
    nodes = [
        Node(host, () if topology is None else switches_of(host, topology, topology_file or ""))
        for host in hosts
    ]
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def _check_size(ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise GridError(f"{ranks} ranks are more than {MOST_RANKS}; state a smaller cluster")


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
        reach = _reach(groups, cluster)
        table.add_row(axis, str(len(groups)), str(len(groups[0])), span(groups[0]), reach)
    return table


def traffic(config: Config, grid: Placement, cluster: Cluster, shard_size: int | None) -> str:
    """What a node sends to others in a step along each axis, at most, in a line."""
    if shard_size is not None:
        parallel = config.parallel.model_copy(update={"shard_size": shard_size})
        config = config.model_copy(update={"parallel": parallel})
    library = "gloo" if config.train.device == "cpu" else "nccl"
    sent = off_node(config, grid, cluster, LIBRARIES[library])
    most = {axis: max(node.bytes for node in nodes) for axis, nodes in sent.items()}
    axes = ", ".join(f"{axis} {size_text(size)}" for axis, size in most.items())
    return f"a node sends others, each step, over {library}: {axes}"


def _reach(groups: Sequence[Sequence[int]], cluster: Cluster) -> str:
    """How far the groups of an axis go that go farthest."""
    nodes = max(len({cluster.node_of_rank[rank] for rank in group}) for group in groups)
    if nodes == 1:
        return "inside a node"
    switches = max(cluster.switches(group) for group in groups)
    below = {0: "", 1: " of one switch"}.get(switches, f" of {switches} switches")
    return f"over {nodes} nodes{below}"


def rank_table(grid: Placement, cluster: Cluster) -> Table:
    """One row per rank: its node, its coordinate, and its group along each axis that has one."""
    axes = [axis for axis in INNERMOST_FIRST if grid.size(axis) > 1]
    groups = {axis: _group_of_rank(grid, axis) for axis in axes}
    heads = ["rank", "coordinate", *(f"{axis} group" for axis in axes)]
    has_switches = any(node.switches for node in cluster.nodes)
    table = Table(*(["switch"] if has_switches else []), "node", *heads, box=box.SIMPLE)
    for rank, number in enumerate(cluster.node_of_rank):
        last_of_node = cluster.node_of_rank[rank + 1 : rank + 2] != (number,)
        node = cluster.nodes[number]
        table.add_row(
            *(["/".join(node.switches)] if has_switches else []),
            node.name,
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
