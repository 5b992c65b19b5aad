"""Which interface ranks use: on one host, on several, and when what is stated is wrong."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence

import pytest

from megagrid.errors import GridError
from megagrid.grid import network
from megagrid.grid.network import GLOO, NCCL, addresses, agree, is_loopback, matching

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's interfaces")


class Talk:
    """What ranks say to each other: here each is a thread."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, action=self._conclude, timeout=20)
        self._words: dict[int, dict] = {}
        self._makes = None
        self._result = None

    def share_of(self, rank: int):
        def share(word, conclude):
            self._words[rank], self._makes = json.loads(json.dumps(word)), conclude
            self._barrier.wait()
            if isinstance(self._result, GridError):
                raise self._result
            return self._result

        return share

    def _conclude(self) -> None:
        try:
            self._result = self._makes([self._words[rank] for rank in sorted(self._words)])
        except GridError as error:
            self._result = error


def agreed(
    monkeypatch, networks: Sequence[str], place: str = "127.0.0.1", **stated: Mapping[str, str]
) -> list[str | GridError | None]:
    """What each rank comes to: the interface, or the error. Ranks of this process claim to be in
    `networks`; those of the last have `stated`."""
    talk, found = Talk(len(networks)), [None] * len(networks)
    monkeypatch.setattr(network, "network", lambda: networks[int(threading.current_thread().name)])

    def work(rank: int) -> None:
        mine = stated if networks[rank] == networks[-1] else {}
        try:
            found[rank] = agree(talk.share_of(rank), rank, f"host{networks[rank]}", place, mine)
        except GridError as error:
            found[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(len(networks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@linux
def test_ranks_of_one_host_use_its_loopback(monkeypatch):
    assert agreed(monkeypatch, "aaaa") == ["lo"] * 4


@linux
def test_what_is_stated_stays(monkeypatch):
    assert agreed(monkeypatch, "aa", **{GLOO: "lo", NCCL: "=lo"}) == ["lo"] * 2


@linux
@pytest.mark.parametrize(("variable", "value"), [(GLOO, "ib7"), (NCCL, "ib7"), (NCCL, "=l")])
def test_an_interface_that_is_not_there_is_an_error_on_every_rank(monkeypatch, variable, value):
    found = agreed(monkeypatch, "aab", **{variable: value})
    assert {str(error) for error in found} == {str(found[0])}
    assert str(found[0]).startswith(f"{variable}={value} is no interface of hostb; ")
    assert "unset it" in str(found[0])


@linux
@pytest.mark.parametrize("variable", [GLOO, NCCL])
def test_loopback_on_several_hosts_is_an_error_on_every_rank(monkeypatch, variable):
    found = agreed(monkeypatch, "aabb", **{variable: "lo"})
    assert {str(error) for error in found} == {str(found[0])}
    assert f"{variable}=lo reaches nothing outside of hostb" in str(found[0])


@linux
def test_hosts_that_know_no_way_to_each_other_are_an_error_on_every_rank(monkeypatch):
    """All met at a loopback address, as through a tunnel."""
    found = agreed(monkeypatch, "ab")
    assert {str(error) for error in found} == {str(found[0])}
    assert "has no address that other hosts can reach" in str(found[0]) and GLOO in str(found[0])


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        (GLOO, "eth0", ["eth0"]),
        (GLOO, "eth", []),
        (GLOO, "eth1,lo", ["eth1", "lo"]),
        (NCCL, "eth", ["eth0", "eth1"]),
        (NCCL, "=eth", []),
        (NCCL, "=eth1,lo", ["eth1", "lo"]),
        (NCCL, "^lo,docker", ["eth0", "eth1", "ib0"]),
        (NCCL, "^=eth", ["eth0", "eth1", "ib0", "lo"]),
    ],
)
def test_variables_name_interfaces_each_in_its_manner(variable, value, found):
    assert sorted(matching(variable, value, ["lo", "eth0", "eth1", "ib0"])) == found


@linux
def test_this_hosts_loopback_is_among_its_addresses():
    assert addresses()["lo"] == "127.0.0.1"
    assert is_loopback("127.0.1.1") and is_loopback("::1") and is_loopback(None)
    assert not is_loopback("10.0.0.1")
