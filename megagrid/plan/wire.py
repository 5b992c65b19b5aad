"""What the nodes of a cluster send each other in a step, in closed form. Pure.

What one rank sends of a call, of b bytes as `megagrid.plan.comm` counts them, along n ranks:

    collective       gloo                        NCCL, in rings
    ----------------------------------------------------------------------------
    all_reduce       2 b (n - 1) / n             2 b (n - 1) / n      to a neighbour
    reduce_scatter   2 b (n - 1) / n             b (n - 1) / n        to a neighbour
    all_gather       b (n - 1) / n               b (n - 1) / n        to a neighbour
    all_to_all       b / n                       b / n                to each other rank
    send             b                           b                    to its peer

torch makes a reduce-scatter of gloo's all-reduce. gloo's ring goes in the order of ranks, so that
what leaves a node depends on how often that order does; NCCL's goes through one node after the
other, and leaves each once. (NCCL sends short messages along trees, which leave a node no more
often.) Shares are even: gloo cuts messages at whole elements, so that a rank's may be a few more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Placement, axis_groups
from megagrid.grid.topology import Cluster
from megagrid.pipeline.program import training_schedule
from megagrid.plan.comm import step_communication


class Sent(NamedTuple):
    """What is sent: bytes of tensors, and in how many messages of gloo's."""

    bytes: float = 0.0
    messages: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.bytes + other.bytes, self.messages + other.messages)

    def __mul__(self, times: int) -> Sent:
        return Sent(times * self.bytes, times * self.messages)

    @property
    def on_gloo(self) -> float:
        """With what gloo adds."""
        return self.bytes + self.messages * GLOO_MESSAGE_BYTES


GLOO_MESSAGE_BYTES = 3 * 48
"""Headers of a message: its own, and words about it from both sides. Counted to the sender, though
the receiver sends one of them."""

GLOO_SEGMENT_BYTES = 2**20
"""The most that gloo puts into one message of an all-reduce."""


@dataclass(frozen=True)
class Library:
    """How a library moves tensors.

    Attributes:
        ring: collective -> how often all but one of n parts of a message are sent.
        goes_by_node: whether its rings go through one node after the other, or else by rank.
    """

    ring: Mapping[str, int]
    goes_by_node: bool


LIBRARIES = {
    "gloo": Library({"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1}, goes_by_node=False),
    "nccl": Library({"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}, goes_by_node=True),
}


def off_node(
    config: Config, placement: Placement, cluster: Cluster, library: Library
) -> dict[str, list[Sent]]:
    """What each node sends to others in one step without evaluation, by axis; axes that stay inside
    of nodes are left out."""
    groups = groups_of_ranks(config, placement)
    sent: dict[str, list[Sent]] = {}
    for rank, node in enumerate(cluster.node_of_rank):
        for row in step_communication(config, placement, placement.coordinate(rank)):
            ranks = groups[row.axis][rank]
            peer = None if row.peer is None else ranks[row.peer]
            one = sent_off_node(row.collective, row.bytes, ranks, rank, cluster, library, peer)
            if one.bytes:
                nodes = sent.setdefault(row.axis, [Sent()] * cluster.num_nodes)
                nodes[node] += one * row.calls
    return sent


def sent_off_node(
    collective: str,
    size: float,
    ranks: Sequence[int],
    rank: int,
    cluster: Cluster,
    library: Library,
    peer: int | None = None,
) -> Sent:
    """What `rank` sends to other nodes for one call along `ranks`.

    Args:
        size: bytes of the call.
        peer: the rank that a message goes to.
    """
    nodes, n = cluster.node_of_rank, len(ranks)
    if collective == "send":
        return Sent(size, 1) if nodes[peer] != nodes[rank] else Sent()
    if collective == "all_to_all":
        others = sum(nodes[other] != nodes[rank] for other in ranks)
        return Sent(size * others / n, others)
    rounds = library.ring.get(collective, 0)
    order = sorted(ranks, key=nodes.__getitem__) if library.goes_by_node else list(ranks)
    neighbour = order[order.index(rank) - 1]
    if nodes[neighbour] == nodes[rank]:
        return Sent()
    segments = 2
    if collective != "all_gather":
        segments = max(segments, ceil(size / GLOO_SEGMENT_BYTES / n))
    return Sent(rounds * size * (n - 1) / n, rounds * segments * (n - 1))


def groups_of_ranks(config: Config, placement: Placement) -> dict[str, dict[int, tuple[int, ...]]]:
    """For every axis the ranks that each rank works with along it."""
    stages = training_schedule(config, placement).placement
    sharding = Sharding.of(config, placement)
    after = sharding.after_forward
    groups = axis_groups(
        placement,
        num_kv_heads=config.model.num_kv_heads,
        ends=(stages[0], stages[-1]),
        shard_size=sharding.split if config.parallel.shard_size is not None else None,
        reshard_size=None if isinstance(after, bool) else after,
    )
    return {
        axis: {rank: group for group in all_ for rank in group} for axis, all_ in groups.items()
    }
