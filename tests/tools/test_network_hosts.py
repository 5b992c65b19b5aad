"""Hosts made of namespaces: what they have apart, how fast their links are, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import SCRIPT, Counters, HostsError, NetworkHosts, why_no_hosts

LISTEN = """
import socket
with socket.create_server(("", 9999)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    while connection.recv(1 << 16):
        pass
"""

SEND = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection((sys.argv[1], 9999), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - start)
"""


@pytest.fixture(scope="module", autouse=True)
def can_make_hosts() -> None:
    if reason := why_no_hosts():
        pytest.skip(reason)


def seconds_to_send(hosts: NetworkHosts, sender: str, receiver: str, size: int) -> float:
    """From one host to another, or to itself."""
    listener = hosts.popen(receiver, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    try:
        listener.stdout.readline()
        address = dict(zip(hosts.names, hosts.addresses, strict=True))[receiver]
        return float(hosts.run(sender, sys.executable, "-c", SEND, address, str(size)))
    finally:
        listener.kill()
        listener.communicate()


def left_behind(hosts: NetworkHosts) -> list[str]:
    """Namespaces, links and files with the hosts' prefix."""
    prefix = hosts.names[0][:-2]
    commands = (["ip", "netns", "list"], ["ip", "-o", "link", "show"])
    lines = [
        line
        for command in commands
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    ]
    lines += map(str, Path("/etc/netns").glob("*"))
    return [line for line in lines if prefix in line]


def test_hosts_have_names_and_addresses_of_their_own_and_reach_each_other():
    with NetworkHosts(2) as hosts:
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            assert hosts.run(name, "hostname") == f"{name}\n"
            assert hosts.run(name, "hostname", "-i").strip() == address
        assert seconds_to_send(hosts, *hosts.names, 1000) < 10


def test_a_link_carries_what_its_rate_says_and_counts_it_and_the_inside_of_a_host_is_not_slowed():
    size = 5_000_000
    with NetworkHosts(2, rate="100mbit") as hosts:
        first, second = hosts.names
        before = hosts.counters()
        across = seconds_to_send(hosts, first, second, size)
        change = {name: after - before[name] for name, after in hosts.counters().items()}
        assert size * 8 / across < 1.1 * 100e6
        assert abs(change[first].sent_payload - size) < 1000  # ARP, handshake
        assert abs(change[second].received_bytes - change[first].sent_bytes) < 1000
        seconds_to_send(hosts, first, first, size)
        still = hosts.counters()[first] - before[first] - change[first]
        assert still.sent_bytes < 1000


def test_a_cut_link_carries_nothing_until_it_is_mended():
    with NetworkHosts(2) as hosts:
        first, second = hosts.names
        hosts.cut(second)
        with pytest.raises(HostsError, match=r"timed out|No route"):
            seconds_to_send(hosts, first, second, 1000)
        hosts.mend(second)
        assert seconds_to_send(hosts, first, second, 1000) < 10


def test_leaves_are_joined_by_a_link_of_the_spines_rate():
    with NetworkHosts(4, spine="50mbit") as hosts:
        names = hosts.names
        assert seconds_to_send(hosts, names[0], names[2], 2_000_000) > 8 * 1_700_000 / 50e6
        assert seconds_to_send(hosts, names[0], names[1], 2_000_000) > 0


def test_two_sets_of_hosts_are_there_at_once():
    with NetworkHosts(1) as one, NetworkHosts(1) as other:
        assert one.run(one.names[0], "hostname") != other.run(other.names[0], "hostname")
        with pytest.raises(HostsError, match="HOSTS_NETWORK"):
            network = one.addresses[0].rpartition(".")[0]
            NetworkHosts(1, network=network).__enter__()
        one.run(one.names[0], "true")
    assert not left_behind(one) + left_behind(other)


@pytest.mark.parametrize("delay_s", [0.01, 0.04, 0.08])
def test_down_removes_what_a_killed_up_has_left(delay_s):
    hosts = NetworkHosts(8, spine="1gbit")
    call = subprocess.Popen(
        [SCRIPT, "up"], env=hosts.environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(delay_s)
    os.killpg(call.pid, signal.SIGKILL)
    call.wait()
    hosts.down()
    assert not left_behind(hosts)


def test_an_up_that_fails_leaves_nothing():
    hosts = NetworkHosts(2, rate="fast")
    call = subprocess.run([SCRIPT, "up"], env=hosts.environment, capture_output=True, text=True)
    assert call.returncode != 0 and "fast" in call.stderr
    assert not left_behind(hosts)


def test_down_ends_what_runs_on_the_hosts_stopped_processes_and_their_children_too():
    with NetworkHosts(1) as hosts:
        forks = "import os, time\nos.fork(); os.fork()\ntime.sleep(1000)"
        command = [sys.executable, "-c", forks]
        process = hosts.popen(hosts.names[0], command, stdout=subprocess.PIPE)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGSTOP)
    assert process.stdout.read() == b""  # closed only by the last of them
    process.wait()


def test_all_ends_as_the_worst_of_its_commands():
    with NetworkHosts(2) as hosts:
        command = f"[[ $(hostname) != {hosts.names[0]} ]] || exit 3"
        call = subprocess.run([SCRIPT, "all", "bash", "-c", command], env=hosts.environment)
        assert call.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["up"], {"HOSTS_PREFIX": "Node_"}, "HOSTS_PREFIX=Node_ must be"),
        (["up"], {"HOSTS_COUNT": "0"}, "HOSTS_COUNT=0 must be 1 to 99"),
        (["exec", "nobody", "true"], {}, "no host nobody"),
        (["rate"], {}, "rate needs a speed"),
        (["fly"], {}, "unknown verb fly"),
    ],
)
def test_a_mistake_is_one_line(arguments, environment, says):
    call = subprocess.run(
        [SCRIPT, *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    assert call.returncode == 2
    assert call.stderr.startswith("error: ") and call.stderr.count("\n") == 1
    assert says in call.stderr


def test_payload_is_what_is_left_without_headers():
    assert Counters(2 * 66 + 10, 2, 0, 0).sent_payload == 10
