"""The machines a grid runs on. Pure arithmetic, no torch.

cluster = 2 nodes x 4 ranks          node 0: 0 1 2 3      node 1: 4 5 6 7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrid.errors import GridError
from megagrid.grid.nodelist import node_names


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        name: as its users call it.
        switches: that it hangs on, outermost first; none where nobody has told.
        number: the launcher's: two agents of torchrun on one host are two nodes.
    """

    name: str
    switches: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class Cluster:
    """Which node each rank runs on.

    Attributes:
        node_of_rank: for each global rank, the index of its node.
        nodes: by that index.
    """

    node_of_rank: tuple[int, ...]
    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            numbered = tuple(Node(str(node)) for node in range(max(self.node_of_rank) + 1))
            object.__setattr__(self, "nodes", numbered)

    @classmethod
    def uniform(cls, nodes: int, ranks_per_node: int) -> Cluster:
        """`nodes` machines with `ranks_per_node` ranks each, ranks numbered node by node."""
        if nodes < 1 or ranks_per_node < 1:
            raise GridError(
                f"a cluster of {nodes} nodes x {ranks_per_node} GPUs per node has no ranks; "
                "both must be at least 1"
            )
        return cls(tuple(node for node in range(nodes) for _ in range(ranks_per_node)))

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of_rank))

    @property
    def smallest_node(self) -> int:
        """Ranks on the node that has fewest."""
        return min(Counter(self.node_of_rank).values())

    def node(self, rank: int) -> Node:
        """Where a rank runs."""
        return self.nodes[self.node_of_rank[rank]]

    def switches(self, ranks: Sequence[int]) -> int:
        """How many switches these ranks hang on; 0 where that isn't known of all."""
        ways = {self.node(rank).switches for rank in ranks}
        return 0 if () in ways else len(ways)

    def neighbours(self, rank: int) -> list[int]:
        """The ranks of a rank's node, itself among them."""
        mine = self.node_of_rank[rank]
        return [other for other, node in enumerate(self.node_of_rank) if node == mine]


def numbered(nodes: Sequence[Node], rank_order: str) -> tuple[list[int], Cluster]:
    """The order of ranks, and where they then are.

    Args:
        nodes: of each rank, as the launcher numbers ranks.
        rank_order: see `ParallelConfig.rank_order`.

    Returns:
        for each rank the launcher's, and the cluster.
    """
    order = list(range(len(nodes)))
    if rank_order == "topology":
        order = keep_together([(*node.switches, node) for node in nodes])
    index: dict[Node, int] = {}
    node_of_rank = tuple(index.setdefault(nodes[rank], len(index)) for rank in order)
    return order, Cluster(node_of_rank, tuple(index))


def keep_together(paths: Sequence[Sequence[Hashable]]) -> list[int]:
    """The order of ranks in which those of a switch are neighbours, and in it those of a node.

    What is met first comes first: rank 0 stays where it is, and an order that keeps all of them
    together already is left as it is.

        rank       0     1     2     3           0  2  1  3
        path      a/n   b/m   a/n   b/m          a/n   b/m

    Args:
        paths: of each rank, the switches on the way to it, outermost first, and its node.

    Returns:
        for each new rank, the former one.
    """
    met: dict[tuple[Hashable, ...], int] = {}
    keys = []
    for rank, path in enumerate(paths):
        beginnings = [tuple(path[: depth + 1]) for depth in range(len(path))]
        keys.append([*(met.setdefault(beginning, rank) for beginning in beginnings), rank])
    return sorted(range(len(paths)), key=keys.__getitem__)


# --- Files ---------------------------------------------------------------------------------------


def load_topology(path: str) -> dict[str, tuple[str, ...]]:
    """The switches of each node that a file tells of, outermost first, in the form of SLURM's
    topology.conf:

        SwitchName=leaf1 Nodes=node[01-04]
        SwitchName=leaf2 Nodes=node[05-08]
        SwitchName=spine Switches=leaf[1-2]

    `BlockName` stands for a switch as well; other keys are left alone. Of several switches above
    one, the first counts.

    Raises:
        GridError: naming the file, and the line that can't be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise GridError(f"topology file {path} can't be read: {reason}") from None
    above: dict[str, str] = {}
    switch_of: dict[str, str] = {}
    defined: set[str] = set()
    begun = ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.endswith("\\") and number < len(lines):  # goes on in the next
            begun += line[:-1]
            continue
        line, begun = begun + line.removesuffix("\\"), ""
        try:
            _read_switch(line.partition("#")[0], above, switch_of, defined)
        except GridError as error:
            raise GridError(f"topology file {path} line {number}: {error}") from None
    if not switch_of:
        raise GridError(f"topology file {path} tells of no nodes; it needs SwitchName=… Nodes=…")
    return {node: _way(switch, above, path) for node, switch in switch_of.items()}


def _read_switch(
    line: str, above: dict[str, str], switch_of: dict[str, str], defined: set[str]
) -> None:
    """Note what a line tells: the switch above others, and that of nodes."""
    words = [word.partition("=") for word in line.split()]
    values = {key.lower(): value for key, _, value in words}
    name = values.get("switchname") or values.get("blockname")
    if name is None:
        if words and words[0][0].lower() not in ("blocksizes", "topologyparam"):
            raise GridError(f"{line.strip()!r} isn't like SwitchName=leaf1 Nodes=node[01-04]")
        return
    if name in defined:
        raise GridError(f"{name} has a line already; give each switch one, with all of its nodes")
    defined.add(name)
    for switch in node_names(values["switches"]) if values.get("switches") else ():
        above.setdefault(switch, name)
    for node in node_names(values["nodes"]) if values.get("nodes") else ():
        if switch_of.setdefault(node, name) != name:
            raise GridError(f"{node} is on both {switch_of[node]} and {name}")


def _way(switch: str, above: dict[str, str], path: str) -> tuple[str, ...]:
    """The switches from the outermost to this one."""
    way = [switch]
    while (outer := above.get(way[-1])) is not None:
        if outer in way:
            raise GridError(f"topology file {path} puts switch {outer} below itself")
        way.append(outer)
    return tuple(reversed(way))


def switches_of(host: str, topology: Mapping[str, tuple[str, ...]], path: str) -> tuple[str, ...]:
    """Those of a node, which a file may call by its name without the domain.

    Raises:
        GridError: it doesn't tell of this node.
    """
    for name in (host, host.partition(".")[0]):
        if name in topology:
            return topology[name]
    raise GridError(f"topology file {path} doesn't tell of node {host}; add it to a switch")
