"""What a launcher makes of the address where node 0 should be."""

from __future__ import annotations

import socket

from megagrid.launcher.launch import Rendezvous
from megagrid.launcher.link import SILENCE_SECONDS, Link, first_word
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
