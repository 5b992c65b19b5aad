"""The grid that a recipe asks for, on the nodes that there are."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Axis
from megagrid.grid.placement import Placement
from megagrid.grid.start import _cluster, expect_steps, grid_of, with_shard_size
from tests.end_to_end.t0 import strategy, t0


def axes_on_rank(placement: Placement, nodes: tuple[int, ...], keys: dict) -> tuple[Axis, ...]:
    """The axes over which this rank's weights are split, and repeated, as (name, ranks, rank)."""
    config, rank = t0("unused", placement, keys), dist.get_rank()
    environment = RankEnvironment(rank, placement.world_size, node=nodes[rank])
    cluster = _cluster(environment, torch.device("cpu"))
    config = with_shard_size(config, placement.shard_size_in_nodes(cluster))
    grid = grid_of(config, placement, rank, "cpu")
    axes = grid.dp_shard, grid.dp_replicate, grid.dp_reshard
    return tuple((axis.name, axis.ranks, axis.rank) for axis in axes)


def test_hybrid_shard_splits_inside_the_real_nodes_of_the_ranks(ranks):
    keys = strategy("HYBRID_SHARD")
    found = ranks.run(axes_on_rank, Placement(dp=4), (0, 0, 1, 1), keys, world_size=4)
    assert found == [
        (("dp_shard", (0, 1), 0), ("dp_replicate", (0, 2), 0), ("dp_reshard", (0,), 0)),
        (("dp_shard", (0, 1), 1), ("dp_replicate", (1, 3), 0), ("dp_reshard", (1,), 0)),
        (("dp_shard", (2, 3), 0), ("dp_replicate", (0, 2), 1), ("dp_reshard", (2,), 0)),
        (("dp_shard", (2, 3), 1), ("dp_replicate", (1, 3), 1), ("dp_reshard", (3,), 0)),
    ]


def test_on_one_node_hybrid_shard_splits_over_all(ranks):
    keys = strategy("HYBRID_SHARD")
    found = ranks.run(axes_on_rank, Placement(tp=2, dp=2), (0, 0, 0, 0), keys, world_size=4)
    assert [shard for shard, _, _ in found] == [
        ("dp", (0, 2), 0),
        ("dp", (1, 3), 0),
        ("dp", (0, 2), 1),
        ("dp", (1, 3), 1),
    ]


def test_a_stated_size_and_neighbours_between_passes_are_the_grids(ranks):
    keys = {"parallel": {"reshard_after_forward": 2}}
    found = ranks.run(axes_on_rank, Placement(dp=4), (0, 0, 1, 1), keys, world_size=4)
    assert [reshard for _, _, reshard in found] == [
        ("dp_reshard", (0, 1), 0),
        ("dp_reshard", (0, 1), 1),
        ("dp_reshard", (2, 3), 0),
        ("dp_reshard", (2, 3), 1),
    ]


def timeouts_before_and_in_steps(placement: Placement, keys: dict) -> list[tuple[float, float]]:
    """Seconds that a collective of each group may take."""
    config = t0("unused", placement, keys)
    grid = grid_of(config, placement, dist.get_rank(), "cpu")
    groups = [axis.group for axis in (grid.tp, grid.dp, grid.stage, grid.host)]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    before = [one._timeout.total_seconds() for one in options]
    expect_steps(config, grid)
    return list(zip(before, (one._timeout.total_seconds() for one in options), strict=True))


def test_before_the_first_step_collectives_may_wait_longer(ranks):
    """E6. By themselves; a rank's heart gives up sooner."""
    keys = {"train": {"timeout_seconds": 5.0, "setup_timeout_seconds": 100.0}}
    placement = Placement(tp=2, dp=2)
    for found in ranks.run(timeouts_before_and_in_steps, placement, keys, world_size=4):
        assert found == [(130.0, 35.0)] * 4
