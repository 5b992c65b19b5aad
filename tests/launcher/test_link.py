"""What a launcher makes of the address where node 0 should be."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from megagrid.launcher.launch import Rendezvous
from megagrid.launcher.link import SILENCE_SECONDS, Link, first_word
from megagrid.launcher.rounds import Council, Terms
from megagrid.launcher.watch import LOOK_SECONDS


def test_a_program_that_listens_and_says_nothing_is_no_node_0():
    patience = 30.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = Rendezvous(*silent.getsockname())
        link = Link(1, where, first_word(1, "run"), patience=patience)
        for _ in range(int((patience + SILENCE_SECONDS) / LOOK_SECONDS) - 1):
            link.look()
        assert link.lost is None
        for _ in range(3):
            link.look()
        assert f"--rendezvous {where}: no launcher answered there for 30 s" in link.lost


@pytest.fixture
def node() -> Iterator[Callable[..., Link]]:
    """Makes launchers' ends of a job of three nodes, that of node 0 at the first call."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = Rendezvous(*free.getsockname())
    made: list[Link] = []

    def make(number: int) -> Link:
        council = Council(Terms(fewest=3, most=3)) if number == 0 else None
        made.append(Link(number, where, first_word(1, "run"), council))
        return made[-1]

    make(0)
    yield make
    for link in reversed(made):
        link.close(0.0)


def wait_for(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_joined(link: Link) -> bool:
    return link._passes > 0


def test_of_launchers_that_take_a_number_at_one_moment_one_has_it(node):
    links = [node(1), node(1), node(1), node(2)]
    wait_for(lambda: sum(link.lost is not None for link in links) == 2)
    refused = [link for link in links if link.lost]
    assert {link.node for link in refused} == {1}
    assert all("--node-rank 1 is taken, by the launcher on " in link.lost for link in refused)


def test_a_number_whose_launcher_is_gone_is_anothers(node):
    former = node(1)
    wait_for(lambda: has_joined(former))
    former.close(0.0)
    again = node(1)
    wait_for(lambda: has_joined(again) or again.lost)
    assert again.lost is None
