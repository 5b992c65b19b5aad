"""Files that tell which switch a node hangs on."""

from __future__ import annotations

import pytest

from megagrid.errors import GridError
from megagrid.grid.topology import Cluster, Node, load_topology, switches_of

TREE = """
# Two leaves under a spine, as SLURM's manual has it.
SwitchName=leaf1 Nodes=node[01-02] LinkSpeed=900
switchname=leaf2 nodes=node03,\\
node04
SwitchName=spine Switches=leaf[1-2]  # Level=1
"""

BLOCKS = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n3\nBlockSizes=2\n"


def topology(tmp_path, text):
    path = tmp_path / "topology.conf"
    path.write_text(text)
    return load_topology(str(path))


def test_nodes_hang_on_their_leaf_and_what_is_above_it(tmp_path):
    assert topology(tmp_path, TREE) == {
        "node01": ("spine", "leaf1"),
        "node02": ("spine", "leaf1"),
        "node03": ("spine", "leaf2"),
        "node04": ("spine", "leaf2"),
    }


def test_a_line_goes_on_after_a_backslash_unless_it_is_the_last(tmp_path):
    text = "SwitchName=a \\\n Nodes=n1\nSwitchName=b Nodes=n2 \\"
    assert topology(tmp_path, text) == {"n1": ("a",), "n2": ("b",)}


def test_blocks_are_switches(tmp_path):
    assert topology(tmp_path, BLOCKS) == {"n1": ("b1",), "n2": ("b1",), "n3": ("b2",)}


def test_of_two_spines_above_a_leaf_the_first_counts(tmp_path):
    text = "SwitchName=a Nodes=n1\nSwitchName=s1 Switches=a\nSwitchName=s2 Switches=a\n"
    assert topology(tmp_path, text) == {"n1": ("s1", "a")}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "tells of no nodes"),
        ("SwitchName=a Nodes=n1\nnodes n1 n2", "line 2: 'nodes n1 n2' isn't like SwitchName="),
        ("SwitchName=a Nodes=n[2-1]", "line 1: node list 'n[2-1]'"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "line 2: n1 is on both a and b"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c\nSwitchName=c Switches=b",
            "puts switch b below itself",
        ),
        (
            "SwitchName=a Nodes=n[1,3]\nSwitchName=a Nodes=n[2,4]",
            "line 2: a has a line already",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_told_in_a_line(tmp_path, text, told):
    with pytest.raises(GridError) as refused:
        topology(tmp_path, text)
    assert told in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_isnt_there_is_named(tmp_path):
    with pytest.raises(GridError, match=r"none\.conf can't be read: No such file"):
        load_topology(str(tmp_path / "none.conf"))


def test_a_node_is_found_by_its_name_with_or_without_the_domain():
    tree = {"n1": ("a",), "n2.example.org": ("b",)}
    assert switches_of("n1.example.org", tree, "file") == ("a",)
    assert switches_of("n2.example.org", tree, "file") == ("b",)
    with pytest.raises(GridError, match="topology file file doesn't tell of node n3; add it"):
        switches_of("n3", tree, "file")


def test_switches_of_ranks_are_counted_where_all_are_known():
    left, right = Node("a", ("s", "left")), Node("b", ("s", "right"))
    assert Cluster((0, 0, 1), (left, right)).switches([0, 1]) == 1
    assert Cluster((0, 0, 1), (left, right)).switches([0, 1, 2]) == 2
    assert Cluster((0, 0, 1), (left, Node("b"))).switches([0, 2]) == 0
