from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from itertools import groupby

import pytest

from megagrid.cli import main
from megagrid.errors import GridError
from megagrid.grid.command import span
from megagrid.grid.placement import AXES, Coordinate, Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster, keep_together
from tests.config import recipe

GRIDS = [
    Placement(pp=pp, dp=dp, cp=cp, tp=tp)
    for pp in (1, 2, 3)
    for dp in (1, 2)
    for cp in (1, 2)
    for tp in (1, 2, 4)
]


def ids(grid: Placement) -> str:
    return "x".join(f"{axis}{grid.size(axis)}" for axis in AXES)


@pytest.mark.parametrize("grid", GRIDS, ids=ids)
def test_rank_and_coordinate_are_inverse(grid):
    assert [grid.rank(grid.coordinate(rank)) for rank in range(grid.world_size)] == list(
        range(grid.world_size)
    )


@pytest.mark.parametrize("grid", GRIDS, ids=ids)
@pytest.mark.parametrize("axes", [*((axis,) for axis in AXES), ("dp", "cp"), ("pp", "tp")])
def test_groups_share_all_other_coordinates_and_hold_every_rank_once(grid, axes):
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert len(group) == math.prod(grid.size(axis) for axis in axes)
        assert list(group) == sorted(group)
        rest = {
            tuple(getattr(grid.coordinate(rank), axis) for axis in AXES if axis not in axes)
            for rank in group
        }
        assert len(rest) == 1


def test_the_grid_is_the_one_drawn_in_the_docstring():
    grid = Placement(tp=2, dp=2, pp=2)
    assert grid.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.coordinate(5) == Coordinate(pp=1, dp=0, cp=0, tp=1)


@pytest.mark.parametrize("dp", [None, 2])
def test_dp_fills_the_world(dp):
    assert Placement.for_world(16, tp=2, pp=4, cp=1, dp=dp) == Placement(tp=2, pp=4, dp=2)


@pytest.mark.parametrize(
    ("world_size", "dp", "told"),
    [
        (6, None, "6 ranks can't be divided by .* = 4; start a multiple of 4"),
        (3, None, "start a multiple of 4"),
        (8, 4, r"data_parallel_size=4 = 16 ranks, but 8 were started; start 16"),
    ],
)
def test_a_world_that_is_no_grid_is_refused(world_size, dp, told):
    with pytest.raises(GridError, match=told):
        Placement.for_world(world_size, tp=2, pp=2, cp=1, dp=dp)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "tp", "fitting"),
    [
        (2, 3, 2, 1),
        (2, 2, 4, 2),
        (4, 2, 8, 2),
        (2, 6, 4, 2),
        (1, 6, 4, None),
        (2, 4, 4, None),
        (2, 8, 4, None),
        (3, 4, 2, None),
    ],
)
def test_a_tp_group_across_nodes_is_refused_with_the_largest_tp_that_fits(
    nodes, ranks_per_node, tp, fitting
):
    cluster = Cluster.uniform(nodes, ranks_per_node)
    grid = Placement(tp=tp, dp=cluster.world_size // tp)
    if fitting is None:
        check_tp_inside_nodes(grid, cluster)
        return
    with pytest.raises(GridError, match=rf"use parallel\.tensor_parallel_size={fitting} "):
        check_tp_inside_nodes(grid, cluster)


def test_nodes_of_unequal_size_are_seen_as_they_are():
    with pytest.raises(GridError, match=r"tp group \{2,3\} on nodes 0 and 1"):
        check_tp_inside_nodes(Placement(tp=2, dp=3), Cluster((0, 0, 0, 1, 1, 1)))
    check_tp_inside_nodes(Placement(tp=2, dp=3), Cluster((0, 0, 0, 0, 1, 1)))


@pytest.mark.parametrize(
    ("placement", "cluster", "size"),
    [
        (Placement(dp=8), Cluster.uniform(1, 8), 8),
        (Placement(dp=8), Cluster.uniform(2, 4), 4),
        (Placement(tp=2, dp=4), Cluster.uniform(2, 4), 2),
        (Placement(tp=4, dp=2), Cluster.uniform(2, 4), 1),
        (Placement(pp=2, dp=4), Cluster.uniform(2, 4), 4),
        (Placement(dp=2, cp=2, tp=2), Cluster.uniform(2, 4), 2),
        (Placement(pp=2, dp=4), Cluster((0, 0, 1, 1, 1, 1, 2, 2)), 2),
    ],
)
def test_ranks_that_shard_together_are_those_of_a_dp_group_in_a_node(placement, cluster, size):
    assert placement.shard_size_in_nodes(cluster) == size


def test_nodes_with_unlike_shares_of_a_dp_group_leave_the_size_to_the_recipe():
    with pytest.raises(GridError) as refused:
        Placement(dp=6).shard_size_in_nodes(Cluster((0, 0, 0, 0, 1, 1)))
    assert "share one are 2 or 4; state parallel.shard_size, one of 1, 2, 3, 6" in str(
        refused.value
    )


def test_a_cluster_without_ranks_is_refused():
    with pytest.raises(GridError, match="0 nodes x 8"):
        Cluster.uniform(0, 8)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((0, 1), "0,1"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 8), "0,8"),
        ((0, 8, 16, 24), "0,8,16,24"),
        ((0, 8, 16, 24, 32), "0,8,..,32"),
    ],
)
def test_a_span_names_its_ends_and_its_stride(ranks, text):
    assert span(ranks) == text


# --- megagrid grid -------------------------------------------------------------------------------


def rank_map(out: str) -> dict[int, list[str]]:
    """The cells of each rank's row: node, rank, coordinate, groups."""
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return {
        int(row[1]): row for row in rows if len(row) > 2 and row[1].isdigit() and "pp" in row[2]
    }


def test_the_rank_map_puts_tp_groups_inside_nodes(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=4"]
    assert main([*command, "--nodes", "2", "--gpus-per-node", "4"]) == 0
    rows = rank_map(capsys.readouterr().out)
    assert sorted(rows) == list(range(8))
    assert {rows[rank][3] for rank in range(4)} == {"0-3"}
    assert {rows[rank][3] for rank in range(4, 8)} == {"4-7"}
    assert rows[6] == ["1", "6", "pp0 dp1 cp0 tp2", "4-7", "2,6"]


def test_a_tp_group_across_nodes_is_drawn_only_if_allowed(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=2"]
    command += ["train.global_batch_size=6", "--nodes", "2", "--gpus-per-node", "3"]
    assert main(command) == 2
    assert "error: parallel.tensor_parallel_size=2 puts tp group {2,3}" in capsys.readouterr().err
    assert main([*command, "parallel.allow_tp_across_nodes=true"]) == 0
    seen = capsys.readouterr()
    assert "warning: 1 of 3 tp groups cross nodes" in seen.err
    assert sorted(rank_map(seen.out)) == list(range(6))


def test_shards_are_drawn_inside_nodes_and_their_replicas_across(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=2"]
    command += ["parallel.sharding_strategy=HYBRID_SHARD", "--nodes", "2", "--gpus-per-node", "4"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"dp_shard +4 +2 +0,2 +inside a node", out)
    assert re.search(r"dp_replicate +4 +2 +0,4 +over 2 nodes", out)


TREE = "SwitchName=l1 Nodes=n1,n3\nSwitchName=l2 Nodes=n2,n4\nSwitchName=top Switches=l[1-2]\n"


def test_nodes_are_named_and_those_of_a_switch_are_neighbours(tmp_path, capsys):
    (tmp_path / "tree").write_text(TREE)
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=2"]
    command += ["parallel.pipeline_parallel_size=2", "--hosts", "n[1-4]", "--tasks-per-node", "2"]
    assert main([*command, "--topology", str(tmp_path / "tree")]) == 0
    out = capsys.readouterr().out
    assert "ranks are numbered so that nodes of a switch are neighbours" in out
    rows = [re.split(" +", line.strip())[:3] for line in out.splitlines() if "top/" in line]
    assert rows == [
        [f"top/l{switch}", node, str(rank)]
        for rank, (switch, node) in enumerate(
            (switch, node)
            for switch, nodes in (("1", ("n1", "n3")), ("2", ("n2", "n4")))
            for node in nodes
            for _ in range(2)
        )
    ]
    assert re.search(r"tp +4 +2 +0,1 +inside a node", out)
    assert re.search(r"dp +4 +2 +0,2 +over 2 nodes of one switch", out)
    assert re.search(r"pp +4 +2 +0,4 +over 2 nodes of 2 switches", out)


@pytest.mark.parametrize(("device", "library"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_what_a_node_sends_others_in_a_step_is_stated_by_axis(tmp_path, capsys, device, library):
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=2"]
    command += [f"train.device={device}", "--gpus-per-node", "4"]
    assert main([*command, "--nodes", "2"]) == 0
    (line,) = re.findall("a node sends others.*", capsys.readouterr().out)
    assert f"over {library}: dp " in line and "tp" not in line
    assert main([*command, "--nodes", "1"]) == 0
    assert "a node sends others" not in capsys.readouterr().out


def test_a_tp_group_across_unequal_nodes_is_refused_with_their_names(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "parallel.tensor_parallel_size=2"]
    command += ["train.global_batch_size=6", "--hosts", "gpu-a,gpu-b"]
    assert main([*command, "--tasks-per-node", "3(x2)"]) == 2
    assert "tp group {2,3} on nodes gpu-a and gpu-b; with 3 ranks" in capsys.readouterr().err
    assert main([*command, "--tasks-per-node", "4,2"]) == 0
    out = capsys.readouterr().out
    assert "6 ranks = tp 2 x cp 1 x dp 3 x pp 1 (innermost first) on 2 nodes x 4,2" in out


def test_hosts_that_contradict_their_number_are_refused(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "--hosts", "a,b", "--gpus-per-node", "2"]
    assert main([*command, "--nodes", "3"]) == 2
    assert "--hosts a,b are 2 nodes, --nodes says 3" in capsys.readouterr().err
    assert main([*command, "--tasks-per-node", "2(x2)"]) == 2
    assert "--hosts needs one of --tasks-per-node COUNTS and" in capsys.readouterr().err


def test_a_map_that_no_screen_holds_is_refused(tmp_path, capsys):
    command = ["grid", str(recipe.write(tmp_path)), "--nodes", "9999999999"]
    assert main([*command, "--gpus-per-node", "8"]) == 2
    assert "state a smaller cluster" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Order


def random_paths(draw: random.Random) -> list[tuple[str, ...]]:
    """Of ranks on a few nodes, each below a switch or two, in any order."""
    nodes = []
    for number in range(draw.randint(1, 5)):
        switches = (f"spine{draw.randint(0, 1)}", f"leaf{draw.randint(0, 1)}")
        nodes.append((*switches[: draw.randint(0, 2)], f"node{number}"))
    paths = [node for node in nodes for _ in range(draw.randint(1, 3))]
    draw.shuffle(paths)
    return paths


def are_together(paths: Sequence[tuple[str, ...]]) -> bool:
    """Whether the ranks below each switch, and on each node, are neighbours."""
    for depth in range(1, max(map(len, paths)) + 1):
        runs = [key for key, _ in groupby(path[:depth] for path in paths)]
        deep = [key for key in runs if len(key) == depth]
        if len(set(deep)) < len(deep):
            return False
    return True


@pytest.mark.parametrize("seed", range(100))
def test_an_order_keeps_nodes_and_switches_together_and_moves_no_more_than_it_must(seed):
    paths = random_paths(random.Random(seed))
    order = keep_together(paths)
    assert sorted(order) == list(range(len(paths)))
    assert order[0] == 0
    ordered = [paths[rank] for rank in order]
    assert are_together(ordered)
    for path in set(paths):
        ranks = [rank for rank in order if paths[rank] == path]
        assert ranks == sorted(ranks), "ranks of a node keep their order"
    assert keep_together(ordered) == list(range(len(paths))), "a good order is left alone"
    assert (order == list(range(len(paths)))) == are_together(paths)
