"""Runs over several hosts, each with its own network and name: what they need of those, and that
they train what one host trains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import NetworkHosts, why_no_hosts
from megagrid.config.dump import dump
from megagrid.grid.placement import Placement
from megagrid.train.metrics import read_records
from tests.end_to_end.t0 import ALONE, TP2DP2, TP2PP2, Sections, Trainer, computed, t0

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
QUICKLY_SECONDS = 60.0
"""For an error at the start, where an interpreter alone may take ten on a machine that is busy. Far
below what gloo would wait for."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with NetworkHosts(2) as made:
        yield made


@pytest.fixture
def hosts_files(hosts: NetworkHosts) -> Iterator[dict[str, str]]:
    """What /etc/hosts says on each host; to be set by `set_hosts_file`, and restored."""
    known = [f"{at} {name}" for name, at in zip(hosts.names, hosts.addresses, strict=True)]
    text = "\n".join(["127.0.0.1 localhost", *known, ""])
    yield {name: text for name in hosts.names}
    for name in hosts.names:
        hosts.set_hosts_file(name, text)


class Torchrun:
    """An agent on each host, and two ranks of each."""

    def __init__(self, hosts: NetworkHosts, folder: Path, placement: Placement, *parts: Sections):
        self.hosts = hosts
        self.folder = folder
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(dump(t0(folder / "run", placement, *parts)), encoding="utf-8")

    def run(
        self,
        patience_s: float = PATIENCE_SECONDS,
        variables: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> list[tuple[int, str]]:
        """Exit code and output of each agent, whose environments have `variables` in addition."""
        agents = [self._start(node, variables[node]) for node in range(len(self.hosts.names))]
        try:
            outputs = [agent.communicate(timeout=patience_s)[0] for agent in agents]
        finally:
            for agent in agents:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
        return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]

    def _start(self, node: int, variables: Mapping[str, str]) -> subprocess.Popen:
        first = self.hosts.addresses[0]
        options = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
        options += [f"--master-addr={first}", "--master-port=29511"]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        return self.hosts.popen(
            self.hosts.names[node],
            [*command, "-m", "megagrid", "train", str(self.recipe)],
            env={"PYTHONPATH": str(REPOSITORY), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.parametrize("placement", [TP2DP2, TP2PP2], ids=["tp2dp2", "tp2pp2"])
def test_two_hosts_train_what_one_does_bit_for_bit_whatever_their_names_stand_for(
    hosts, hosts_files, tmp_path, trainer: Trainer, placement
):
    """The first host's name leads to its loopback, as Debian has it; the second's to nothing."""
    first, second = hosts.names
    hosts.set_hosts_file(first, f"127.0.0.1 localhost\n127.0.1.1 {first}\n")
    hosts.set_hosts_file(second, "127.0.0.1 localhost\n")
    job = Torchrun(hosts, tmp_path, placement)
    ended = job.run()
    assert [code for code, _ in ended] == [0, 0], ended
    found = read_records(tmp_path / "run" / "metrics.jsonl")
    assert computed(found) == computed(trainer.train(placement).records)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("lo", "GLOO_SOCKET_IFNAME=lo reaches nothing outside of {second}, and the ranks are on"),
        ("far0", "{first} can't reach {second} at 10.255.255.1 "),
    ],
    ids=["loopback", "leads nowhere"],
)
def test_an_interface_that_wont_do_on_one_host_ends_all_ranks_at_once_with_one_reason(
    hosts, tmp_path, value, says
):
    first, second = hosts.names
    if value == "far0":
        hosts.run(second, "ip", "link", "add", value, "type", "bridge")
        hosts.run(second, "ip", "addr", "add", "10.255.255.1/32", "dev", value)
        hosts.run(second, "ip", "link", "set", value, "up")
    job = Torchrun(hosts, tmp_path, TP2DP2)
    for code, output in job.run(QUICKLY_SECONDS, [{}, {"GLOO_SOCKET_IFNAME": value}]):
        assert code == 1, output  # torchrun's own
        assert says.format(first=first, second=second) in output
        assert "GLOO_SOCKET_IFNAME" in output
        assert str(REPOSITORY / "megagrid") not in output  # no traceback but torchrun's


def test_of_two_runs_that_start_at_once_on_two_hosts_in_one_folder_one_trains(hosts, tmp_path):
    recipe = tmp_path / "recipe.toml"
    endless = {"train": {"steps": 100_000}, "logging": {"interval": 1000}}
    recipe.write_text(dump(t0(tmp_path / "run", ALONE, endless)), encoding="utf-8")
    jobs = [
        hosts.popen(
            host,
            [sys.executable, "-m", "megagrid", "train", str(recipe)],
            env={"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts.names
    ]
    pid, _ = os.wait()
    (refused,) = [job for job in jobs if job.pid == pid]
    (training,) = [job for job in jobs if job.pid != pid]
    assert training.poll() is None
    (line,) = refused.stderr.read().splitlines()
    assert "belongs to a run that is still going on" in line
    assert f"on {hosts.names[jobs.index(training)]}" in line
    training.kill()
    training.communicate()
    refused.communicate()
    steps = [record.step for record in read_records(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
