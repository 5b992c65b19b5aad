"""The grid that a recipe asks for, on the nodes that there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megagrid.errors import GridError
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Axis
from megagrid.grid.placement import Placement
from megagrid.grid.start import (
    Meeting,
    device_of_rank,
    expect_steps,
    grid_of,
    meeting,
    renumbering,
    running_grid,
    with_shard_size,
)
from megagrid.grid.topology import Cluster, Node
from tests.end_to_end.t0 import strategy, t0


def axes_on_rank(placement: Placement, nodes: tuple[int, ...], keys: dict) -> tuple[Axis, ...]:
    """The axes over which this rank's weights are split, and repeated, as (name, ranks, rank)."""
    config, rank = t0("unused", placement, keys), dist.get_rank()
    config = with_shard_size(config, placement.shard_size_in_nodes(Cluster(nodes)))
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


# ------------------------------------------------------------------------------------------------
# Meeting

CYCLIC = [("a", 0, ("left",)), ("b", 1, ("right",)), ("a", 0, ("left",)), ("b", 1, ("right",))]
"""Host, node and switches of each rank, as `srun -m cyclic` places them."""


def met_by_all(folder: Path, places: list[tuple[str, int, tuple[str, ...]]], keys: Any = None):
    """What each rank knows once all have met, or its error."""
    config = t0(str(folder), Placement(dp=len(places)), keys or {})

    def come(rank: int) -> Meeting | GridError:
        host, node, switches = places[rank]
        environment = RankEnvironment(
            rank, len(places), rank // 2, node, host, switches, step="mini-1.0-0"
        )
        try:
            with meeting(config, environment) as met:
                return met
        except GridError as error:
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(come, range(len(places))))


def test_ranks_are_renumbered_so_that_those_of_a_node_are_neighbours(tmp_path):
    found = met_by_all(tmp_path, CYCLIC)
    assert [met.environment.rank for met in found] == [0, 2, 1, 3]
    assert [met.environment.local_rank for met in found] == [0, 0, 1, 1]
    for met in found:
        assert met.launcher_ranks == (0, 2, 1, 3)
        assert met.cluster == Cluster(
            (0, 0, 1, 1), (Node("a", ("left",)), Node("b", ("right",), 1))
        )
    assert renumbering(found[0]).endswith("0 to 3 are the launcher's 0 2 1 3")


def test_ranks_that_have_met_share_a_name_that_no_other_start_has(tmp_path):
    starts = [{met.start for met in met_by_all(tmp_path, CYCLIC)} for _ in range(2)]
    assert [len(names) for names in starts] == [1, 1]
    assert starts[0] != starts[1]


def test_the_launchers_order_is_kept_where_the_recipe_says_so(tmp_path):
    found = met_by_all(tmp_path, CYCLIC, {"parallel": {"rank_order": "launcher"}})
    assert [met.environment.rank for met in found] == [0, 1, 2, 3]
    assert not any(met.is_reordered for met in found)
    assert found[0].cluster.node_of_rank == (0, 1, 0, 1)


def test_an_order_that_keeps_nodes_together_is_left_alone(tmp_path):
    found = met_by_all(tmp_path, sorted(CYCLIC))
    assert not any(met.is_reordered for met in found)


def test_two_agents_on_one_host_are_two_nodes(tmp_path):
    found = met_by_all(tmp_path, [("vm", 0, ()), ("vm", 1, ())])
    assert found[1].cluster.node_of_rank == (0, 1)


def test_a_tp_group_is_held_against_the_nodes_after_the_renumbering(tmp_path):
    config = t0("unused", Placement(tp=2, dp=2), {})
    met = met_by_all(tmp_path, CYCLIC, {"parallel": {"rank_order": "launcher"}})[0]
    with (
        pytest.raises(GridError, match=r"tp group \{0,1\} on nodes a and b"),
        running_grid(config, met),
    ):
        pass


def device_words(*seen: tuple[str, str, int | None]) -> list[dict[str, Any]]:
    """Of ranks in order, whose hosts see `visible` and so many devices."""
    local: dict[str, int] = {}
    words = []
    for host, visible, devices in seen:
        local_rank = local[host] = local.get(host, -1) + 1
        words.append(
            {"host": host, "node": 0, "visible": visible, "devices": devices}
            | {"local_rank": local_rank}
        )
    return words


@pytest.mark.parametrize(
    ("seen", "devices"),
    [
        ([("a", "0,1", 2), ("a", "0,1", 2), ("b", "0,1", 2), ("b", "0,1", 2)], [0, 1, 0, 1]),
        ([("a", "0", 1), ("a", "1", 1), ("b", "0", 1), ("b", "1", 1)], [0, 0, 0, 0]),
        ([("a", "0,1", 2), ("a", "2,3", 2)], [0, 0]),
        ([("a", "0,1", 2), ("b", "0,1", 2), ("a", "0,1", 2), ("b", "0,1", 2)], [0, 0, 1, 1]),
        ([("a", "cpu", None), ("a", "cpu", None)], [0, 1]),
    ],
    ids=["shared", "one per task", "two per task", "cyclic", "cpu"],
)
def test_ranks_share_the_devices_that_they_see_together(seen, devices):
    assert device_of_rank(device_words(*seen)) == devices


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(GridError, match="2 ranks on a see the same 1 devices, so that rank 2 has"):
        device_of_rank(device_words(("a", "0", 1), ("a", "1", 1), ("a", "0", 1)))


def test_switches_of_a_file_count_in_place_of_what_slurm_says(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text("SwitchName=one Nodes=a,c\nSwitchName=two Nodes=b\n")
    places = [("a", 0, ()), ("b", 1, ()), ("c", 2, ()), ("b", 1, ())]
    found = met_by_all(tmp_path, places, {"parallel": {"topology_file": str(path)}})
    assert found[0].launcher_ranks == (0, 2, 1, 3)
    assert found[2].cluster.node(1) == Node("c", ("one",), 2)


def test_a_node_that_the_file_doesnt_know_is_told_to_all(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text("SwitchName=one Nodes=a\n")
    keys = {"parallel": {"topology_file": str(path)}}
    found = met_by_all(tmp_path, [("a", 0, ()), ("b", 1, ())], keys)
    for error in found:
        assert isinstance(error, GridError)
        assert "doesn't tell of node b" in str(error)
