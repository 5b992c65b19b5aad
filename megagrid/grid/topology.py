"""The machines a grid runs on. Pure arithmetic, no torch.

cluster = 2 nodes x 4 ranks          node 0: 0 1 2 3      node 1: 4 5 6 7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megagrid.errors import GridError


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        name: as its users call it.
        switches: that it hangs on, outermost first; none where nobody has told.
    """

    name: str
    switches: tuple[str, ...] = ()


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

    def neighbours(self, rank: int) -> list[int]:
        """The ranks of a rank's node, itself among them."""
        mine = self.node_of_rank[rank]
        return [other for other, node in enumerate(self.node_of_rank) if node == mine]


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
