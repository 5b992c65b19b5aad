"""tools/slurm_cluster.sh: what its cluster has, and what it leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.slurm.cluster import NODES, TOOL
from tests.slurm.conftest import running_cluster


def daemons(folder: Path) -> list[str]:
    """Commands of the processes that are told of `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile
            continue
        if str(folder) in text:
            found.append(text)
    return found


def hosts(folder: Path) -> list[str]:
    lines = Path("/etc/hosts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(f"# slurm_cluster {folder}")]


def test_nodes_have_switches_and_devices_and_nothing_is_left_when_it_stops(cluster):
    """Beside another cluster, which goes on."""
    show = "echo $SLURM_NODEID $SLURM_TOPOLOGY_ADDR $CUDA_VISIBLE_DEVICES"
    with running_cluster(prefix="mgother", gpus=2) as other:
        names = [f"mgother{number:02}" for number in range(1, NODES + 1)]
        assert hosts(other.folder) == names
        options = (f"--nodes={NODES}", "--ntasks-per-node=1", "--gpus-per-node=2")
        shown = other.run("srun", *options, "bash", "-c", show)
        assert sorted(shown.splitlines()) == [
            f"{node} spine.leaf{1 + node // 2}.{name} 0,1" for node, name in enumerate(names)
        ]
        assert len(daemons(other.folder)) >= NODES + 2
    assert daemons(other.folder) == []
    assert hosts(other.folder) == []
    assert len(hosts(cluster.folder)) == NODES
    assert cluster.run("srun", "--ntasks=1", "hostname")


def test_a_cluster_keeps_its_names_when_one_stops_whose_folder_begins_alike(cluster):
    beginning = {"CLUSTER_DIR": str(cluster.folder)[:-1]}
    subprocess.run([TOOL, "stop"], env=cluster.environment | beginning, check=True)
    assert len(hosts(cluster.folder)) == NODES
