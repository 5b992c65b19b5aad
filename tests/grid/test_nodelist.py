"""Lists as SLURM prints them."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from megagrid.errors import GridError
from megagrid.grid.nodelist import node_names, tasks_per_node

LISTS = {
    "x": ["x"],
    "node[01-03,07],gpu-a[1-2]-ib0,x": [
        *("node01", "node02", "node03", "node07"),
        *("gpu-a1-ib0", "gpu-a2-ib0"),
        "x",
    ],
    "a[1-2]b[3-4]": ["a1b3", "a1b4", "a2b3", "a2b4"],
    "n[1-2][3-4]": ["n13", "n14", "n23", "n24"],
    "a[001-3]": ["a001", "a002", "a003"],
    "a[9-11]": ["a9", "a10", "a11"],
    "a[09-11]": ["a09", "a10", "a11"],
    "a[8-010]": ["a8", "a9", "a10"],
    " a , b,, c": ["a", "b", "c"],
    "[0-1].rack7.example.org": ["0.rack7.example.org", "1.rack7.example.org"],
}


@pytest.mark.parametrize(("text", "names"), LISTS.items(), ids=LISTS)
def test_a_list_names_its_nodes_in_order(text, names):
    assert node_names(text) == names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no nodes"),
        ("(null)", "names no nodes"),
        ("n[3-1]", "'3-1', which is no range"),
        ("n[]", "'', which is no range"),
        ("n[a-b]", "'a-b', which is no range"),
        ("n[1-2", "can't be read from '[1-2' on"),
        ("n1 n2", "can't be read from 'n2' on"),
        ("n]", "can't be read"),
        ("a,b,a", "names a twice"),
        ("n[1-9999999999999]", "more than 100000 nodes"),
        ("n[1-9999][1-9999]", "more than 100000 nodes"),
    ],
)
def test_what_is_no_list_is_refused_in_a_line(text, told):
    with pytest.raises(GridError) as refused:
        node_names(text)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def printed(draw: random.Random) -> tuple[str, list[str]]:
    """A list of a few hosts in a random form, and their names."""
    items, names = [], []
    for index in range(draw.randint(1, 4)):
        prefix = f"{draw.choice('abc')}{'-rack' * draw.randint(0, 1)}{index}x"
        width, start = draw.randint(1, 3), draw.randint(0, 12)
        spans = [(start, start + draw.randint(0, 4)), (start + 20, start + 20)]
        ends = [(str(low).zfill(width), str(high).zfill(width)) for low, high in spans]
        shown = ",".join(low if low == high else f"{low}-{high}" for low, high in ends)
        suffix = draw.choice(["", "-ib0"])
        items.append(f"{prefix}[{shown}]{suffix}")
        names += [
            f"{prefix}{str(number).zfill(width)}{suffix}"
            for low, high in spans
            for number in range(low, high + 1)
        ]
    return ",".join(items), names


@pytest.mark.parametrize("seed", range(50))
def test_any_list_of_ranges_is_read_back(seed):
    text, names = printed(random.Random(seed))
    assert node_names(text) == names


@pytest.mark.skipif(
    shutil.which("scontrol") is None,
    reason="needs scontrol of SLURM: apt-get install slurm-client",
)
@pytest.mark.parametrize("text", [text for text in LISTS if "]-" not in text and "]." not in text])
def test_slurm_reads_a_list_in_the_same_way(text, tmp_path):
    """Its version 22.05 reads nothing behind a bracket, as later ones do."""
    settings = tmp_path / "slurm.conf"
    settings.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    ran = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={"SLURM_CONF": str(settings), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.split() == node_names(text), ran.stderr


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2]), ("16(x1)", [16])],
)
def test_tasks_of_each_node_are_counted(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "2(x3", "0", "-1", "2(3)", "a", "1,,2"])
def test_what_are_no_counts_is_refused(text):
    with pytest.raises(GridError, match="must be written like"):
        tasks_per_node(text)


def test_counts_of_far_too_many_nodes_are_refused():
    with pytest.raises(GridError, match="more than 100000 nodes"):
        tasks_per_node("1(x99999999999)")
