"""By which interface a rank talks to the others. No torch.

gloo asks the host's name for an address. That name may resolve to nothing, or to an address of the
host's own loopback: then some ranks fail, and others wait for them. So ranks find out themselves,
by what they say to each other before there is a process group:

    all ranks on one host     its loopback interface
    else                      the one by which the host reaches the place where ranks meet; on the
                              host that is that place, the one by which it reaches another host

An interface stated by GLOO_SOCKET_IFNAME is used instead. NCCL looks for interfaces itself and is
told nothing; what NCCL_SOCKET_IFNAME states is looked at. Last, a rank of each host connects to one
of the next. Whatever is wrong on a host is an error on all, so that none waits for another.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megagrid.errors import GridError
from megagrid.grid.bootstrap import GLOO_INTERFACE as GLOO
from megagrid.grid.bootstrap import NCCL_INTERFACE as NCCL

SECONDS_TO_CONNECT = 10.0

SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address; netdevice(7)."""

Word = dict[str, Any]
Share = Callable[[Word, Callable[[Sequence[Word]], Word]], Word]
"""Tells all ranks a word, and returns what the function makes of the words of all, in rank order,
or raises the GridError that it raises."""


def agree(
    share: Share, rank: int, host: str, meeting_place: str, stated: Mapping[str, str]
) -> str | None:
    """The interface for gloo's connections on this host; None to leave it to gloo.

    Args:
        host: how errors call this rank's host.
        meeting_place: name or address of the host where the ranks have met.
        stated: values of GLOO and NCCL, where they are set and matter.

    Raises:
        GridError: on all ranks: on some host an interface is stated that isn't there or reaches no
            other, or a host can't reach the next.
    """
    here = addresses()
    chosen = matching(GLOO, stated[GLOO], list(here)) if GLOO in stated else []
    address = here[chosen[0]] if chosen else address_toward(meeting_place)
    word = {"host": host, "network": network(), "address": address}
    hosts = share(word | _wrong(host, stated, here), _hosts)["hosts"]
    if len(hosts) == 1:
        address = "127.0.0.1"
    elif is_loopback(address):
        others = [one["address"] for one in hosts if not is_loopback(one["address"])]
        address = address_toward(others[0]) if others else None
    if len(hosts) > 1:
        _check_connections(share, rank, address, hosts)
    names = {address: name for name, address in here.items()}
    return stated.get(GLOO) or names.get(address)


# --- This host -----------------------------------------------------------------------------------


def network() -> str:
    """Stands for the network that this process is in: those in it reach each other by loopback. A
    machine has several where containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # another system than Linux
        return socket.gethostname()


def addresses() -> dict[str, str]:
    """The interfaces here that have an address, and its first; none on another system than
    Linux."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def address_toward(place: str) -> str | None:
    """The address that this host shows to the host at `place`; None if there is no way there."""
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)  # chooses a route; nothing is sent
                return probe.getsockname()[0]
    return None


def is_loopback(address: str | None) -> bool:
    """Whether only this host itself can reach the address, if any."""
    return address is None or ipaddress.ip_address(address).is_loopback


def matching(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """The interfaces that a variable states: gloo's has names, NCCL's beginnings of names, whole
    names after "=", or after "^" what is left out."""
    if variable == GLOO:
        return [name for name in names if name in value.split(",")]
    wanted = tuple(value.lstrip("^=").split(","))
    test = wanted.__contains__ if value.lstrip("^").startswith("=") else _begins_with(wanted)
    return [name for name in names if test(name) != value.startswith("^")]


def _begins_with(beginnings: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(beginnings)


# --- All hosts -----------------------------------------------------------------------------------


def _wrong(host: str, stated: Mapping[str, str], here: Mapping[str, str]) -> Word:
    """What is wrong with what is stated on this host: always, or if there are several hosts."""
    wrong: dict[str, list[str]] = {"always": [], "on_several": []}
    others = [name for name, address in here.items() if not is_loopback(address)]
    remedy = f"state {' or '.join(others)}, or unset it" if others else "unset it"
    for variable, value in stated.items() if here else ():
        found = matching(variable, value, list(here))
        if not found:
            wrong["always"].append(f"{variable}={value} is no interface of {host}; {remedy}")
        elif all(is_loopback(here[name]) for name in found):
            wrong["on_several"].append(
                f"{variable}={value} reaches nothing outside of {host}, and the ranks are on "
                f"several hosts; {remedy}"
            )
    return wrong


def _hosts(words: Sequence[Word]) -> Word:
    """Every network, by the word and number of its first rank."""
    hosts: dict[str, Word] = {}
    for rank, word in enumerate(words):
        hosts.setdefault(word["network"], word | {"rank": rank})
    _raise_first(text for word in words for text in word["always"])
    if len(hosts) > 1:
        _raise_first(text for word in words for text in word["on_several"])
    return {"hosts": list(hosts.values())}


def _check_connections(share: Share, rank: int, address: str | None, hosts: Sequence[Word]) -> None:
    """Connect the first rank of each host to that of the next.

    Raises:
        GridError: on all ranks, with the first that can't.
    """
    firsts = [one["rank"] for one in hosts]
    place: tuple[str, int] | None = None
    failure: str | None = None
    with ExitStack() as stack:
        if rank in firsts and address is not None:
            server = stack.enter_context(_listening(address))
            place = server.getsockname()[:2]
        places = share({"place": place}, partial(_places, firsts))["places"]
        if rank in firsts:
            number = firsts.index(rank)
            following = (number + 1) % len(hosts)
            pair = hosts[number]["host"], hosts[following]["host"]
            failure = _failure(*pair, places[following])
        share({"failure": failure}, _no_failures)


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _places(firsts: Sequence[int], words: Sequence[Word]) -> Word:
    return {"places": [words[rank]["place"] for rank in firsts]}


def _failure(host: str, following: str, place: Sequence[Any] | None) -> str | None:
    """Why `host`, this one, can't reach `following`; None if it can."""
    remedy = f"state on each host the interface that reaches the others, by {GLOO} (and {NCCL})"
    if place is None:
        return f"{following} has no address that other hosts can reach; {remedy}"
    try:
        socket.create_connection(tuple(place), timeout=SECONDS_TO_CONNECT).close()
    except OSError as error:
        reason = error.strerror or error
        return f"{host} can't reach {following} at {place[0]} ({reason}); {remedy}"
    return None


def _no_failures(words: Sequence[Word]) -> Word:
    _raise_first(word["failure"] for word in words)
    return {}


def _raise_first(texts: Iterable[str | None]) -> None:
    for text in filter(None, texts):
        raise GridError(text)
