"""The machines a grid runs on. Pure arithmetic, no torch.

cluster = 2 nodes x 4 ranks          node 0: 0 1 2 3      node 1: 4 5 6 7
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megagrid.errors import GridError


@dataclass(frozen=True)
class Cluster:
    """Which node each rank runs on.

    Attributes:
        node_of_rank: for each global rank, the index of its node.
    """

    node_of_rank: tuple[int, ...]

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
