"""Several hosts on one machine, made by `tools/network_hosts.sh`, for benchmarks and tests.

with NetworkHosts(count=2, rate="1gbit") as hosts:
    first, second = hosts.names
    hosts.run(first, "hostname")
    before = hosts.counters()[first]
"""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parent.parent / "tools/network_hosts.sh"

FRAMING_BYTES = 14 + 20 + 20 + 12
"""Of a packet of TCP over IPv4 as the interface counts it: the headers of Ethernet, IP and TCP, and
TCP's time stamp."""


class HostsError(Exception):
    """Hosts can't be made, or not be reached; the message is the script's."""


class Counters(NamedTuple):
    """What a host's link has carried. A packet that the kernel cuts up only for a real wire counts
    as the one that it is here."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(a - b for a, b in zip(self, other, strict=True)))

    @property
    def sent_payload(self) -> int:
        """Bytes sent, without headers."""
        return self.sent_bytes - FRAMING_BYTES * self.sent_packets


class NetworkHosts:
    """Hosts from `with` on to its end, and whatever runs on them.

    Args:
        count: of hosts.
        rate: of each host's link, each way, as tc writes it; "none": not slowed down.
        spine: rate of the link between leaves of two hosts each; without one there are no leaves.
        prefix, network: what tells them from other hosts on the machine; HOSTS_PREFIX and
            HOSTS_NETWORK of the environment, or drawn, unless stated.
    """

    def __init__(
        self,
        count: int = 2,
        rate: str = "none",
        spine: str = "",
        prefix: str | None = None,
        network: str | None = None,
    ) -> None:
        prefix = prefix or os.environ.get("HOSTS_PREFIX") or _draw_prefix()
        network = network or os.environ.get("HOSTS_NETWORK") or _draw_network()
        self.names = [f"{prefix}{number:02d}" for number in range(1, count + 1)]
        self.addresses = [f"{network}.{number}" for number in range(1, count + 1)]
        self.environment = os.environ | {
            "HOSTS_PREFIX": prefix,
            "HOSTS_NETWORK": network,
            "HOSTS_COUNT": str(count),
            "HOSTS_RATE": rate,
            "HOSTS_SPINE": spine,
        }

    def __enter__(self) -> NetworkHosts:
        try:
            self._call("up")
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def down(self) -> None:
        """Remove the hosts, or what there is of them."""
        self._call("down")

    def popen(self, host: str, command: Sequence[str], **options) -> subprocess.Popen:
        """`command` started on `host`, in a session of its own."""
        options.setdefault("start_new_session", True)
        environment = self.environment | options.pop("env", {})
        return subprocess.Popen([SCRIPT, "exec", host, *command], env=environment, **options)

    def run(self, host: str, *command: str) -> str:
        """What `command` prints on `host`; HostsError if it fails."""
        return self._call("exec", host, *command)

    def set_rate(self, rate: str) -> None:
        self._call("rate", rate)

    def cut(self, host: str) -> None:
        """Unplug the host's cable."""
        self._call("cut", host)

    def mend(self, host: str) -> None:
        self._call("mend", host)

    def counters(self) -> dict[str, Counters]:
        """Of each host's link, since it was made."""
        lines = (line.split() for line in self._call("counters").splitlines())
        return {name: Counters(*map(int, numbers)) for name, *numbers in lines}

    def set_hosts_file(self, host: str, text: str) -> None:
        """What /etc/hosts says on `host`, to commands started from now on."""
        (Path("/etc/netns") / host / "hosts").write_text(text, encoding="utf-8")

    def _call(self, *arguments: str) -> str:
        ended = subprocess.run(
            [SCRIPT, *arguments], env=self.environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise HostsError(f"{SCRIPT.name} {' '.join(arguments)}: {ended.stderr.strip()}")
        return ended.stdout


def why_no_hosts() -> str | None:
    """Why this machine can't play several hosts, and the remedy; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces are root's to make: run as root"
    if not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "ip, tc or unshare is missing: apt-get install iproute2 util-linux"
    try:
        with NetworkHosts(1) as hosts:
            hosts.run(hosts.names[0], "true")
    except HostsError as error:
        return f"no network namespaces here ({error}): run in a privileged container, or on a host"
    return None


def _draw_prefix() -> str:
    return "h" + "".join(random.SystemRandom().choices(string.ascii_lowercase, k=5))


def _draw_network() -> str:
    draw = random.SystemRandom()
    return f"10.{draw.randrange(100, 200)}.{draw.randrange(256)}"
