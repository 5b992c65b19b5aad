"""What leaves a node in a step: which axes cross, and how much along each."""

from __future__ import annotations

import pytest

from megagrid.config.rules import check
from megagrid.config.schema import Config
from megagrid.grid.placement import Placement
from megagrid.grid.topology import Cluster
from megagrid.plan.comm import step_communication
from megagrid.plan.wire import LIBRARIES, Sent, off_node, sent_off_node
from tests.end_to_end.t0 import t0

GLOO, NCCL = LIBRARIES["gloo"], LIBRARIES["nccl"]

BY_NODE, CYCLIC = Cluster((0, 0, 1, 1)), Cluster((0, 1, 0, 1))
EVERYONE = (0, 1, 2, 3)


def config(placement: Placement, **parallel) -> Config:
    made = t0("run", placement, {"parallel": parallel})
    check(made, placement.world_size)
    return made


def of_all(collective: str, cluster: Cluster, library, size: float = 1200) -> list[float]:
    """Bytes that each of four ranks sends to another node, of a call along all of them."""
    return [
        sent_off_node(collective, size, EVERYONE, rank, cluster, library).bytes for rank in EVERYONE
    ]


@pytest.mark.parametrize(
    ("collective", "library", "by_node", "cyclic"),
    [
        ("all_reduce", GLOO, [1800, 0, 1800, 0], [1800] * 4),
        ("reduce_scatter", GLOO, [1800, 0, 1800, 0], [1800] * 4),
        ("all_gather", GLOO, [900, 0, 900, 0], [900] * 4),
        ("all_to_all", GLOO, [600] * 4, [600] * 4),
        ("all_reduce", NCCL, [1800, 0, 1800, 0], [1800, 1800, 0, 0]),
        ("reduce_scatter", NCCL, [900, 0, 900, 0], [900, 900, 0, 0]),
        ("all_gather", NCCL, [900, 0, 900, 0], [900, 900, 0, 0]),
    ],
)
def test_a_ring_leaves_a_node_as_often_as_its_order_does(collective, library, by_node, cyclic):
    assert of_all(collective, BY_NODE, library) == by_node
    assert of_all(collective, CYCLIC, library) == cyclic


def test_along_a_node_nothing_leaves_it():
    one_node = Cluster((0, 0, 0, 0))
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        assert of_all(collective, one_node, GLOO) == [0.0] * 4


def test_gloo_cuts_a_large_reduction_into_segments():
    small = sent_off_node("all_reduce", 100, (0, 1), 0, CYCLIC, GLOO)
    large = sent_off_node("all_reduce", 10 * 2**20, (0, 1), 0, CYCLIC, GLOO)
    assert small == Sent(100, 4)
    assert large == Sent(10 * 2**20, 10)


@pytest.mark.parametrize(("cluster", "crosses"), [(BY_NODE, "dp"), (CYCLIC, "tp")])
def test_tp_inside_nodes_leaves_dp_to_the_wire_and_the_other_way_round(cluster, crosses):
    placement = Placement(tp=2, dp=2)
    assert set(off_node(config(placement), placement, cluster, GLOO)) == {crosses, "world"}


def test_pipelines_over_nodes_send_each_boundarys_messages_once():
    placement = Placement(pp=2, tp=2)
    recipe = config(placement)
    sent = off_node(recipe, placement, BY_NODE, GLOO)
    rows = step_communication(recipe, placement, placement.coordinate(0))
    one_rank = sum(row.calls * row.bytes for row in rows if row.collective == "send")
    assert [node.bytes for node in sent["pp"]] == [2 * one_rank] * 2
    assert "tp" not in sent


def test_a_ring_of_attention_sends_to_the_next_rank_alone():
    placement = Placement(cp=4)
    recipe = config(placement, context_parallel="ring")
    sent = off_node(recipe, placement, BY_NODE, GLOO)["cp"]
    rows = step_communication(recipe, placement, placement.coordinate(0))
    one_rank = sum(row.calls * row.bytes for row in rows if row.collective == "send")
    assert [node.bytes for node in sent] == [one_rank] * 2


def test_hybrid_sharding_inside_nodes_leaves_the_replicas_alone_to_the_wire():
    placement = Placement(dp=4)
    recipe = config(placement, sharding_strategy="HYBRID_SHARD", shard_size=2)
    sent = off_node(recipe, placement, BY_NODE, GLOO)
    assert set(sent) == {"dp_replicate", "dp", "world"}
    assert sent["dp"][0].bytes < 100  # valid tokens
    full = off_node(config(placement), placement, BY_NODE, GLOO)
    assert sent["dp_replicate"][0].bytes < full["dp"][0].bytes
