"""The options of `megagrid train` that say which nodes a job has, named as torchrun's are."""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
from dataclasses import dataclass

from megagrid.errors import GridError
from megagrid.launcher.launch import THIS_MACHINE, Rendezvous


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and how it starts its ranks.

    Attributes:
        fewest, most: nodes that it goes on with, and starts with.
        node: the number of this one.
        rendezvous: where node 0 listens.
        ranks: of each node; None: as many as fill the grid.
        max_restarts: after crashes.
    """

    fewest: int = 1
    most: int = 1
    node: int = 0
    rendezvous: Rendezvous = THIS_MACHINE
    ranks: int | None = None
    max_restarts: int = 0

    @property
    def is_at_rendezvous(self) -> bool:
        """Whether this machine has the address at which node 0 is to listen."""
        for family, kind, protocol, _, address in _addresses(self.rendezvous):
            with socket.socket(family, kind, protocol) as trial, contextlib.suppress(OSError):
                trial.bind((address[0], 0, *address[2:]))
                return True
        return False

    def ranks_here(self, least: int) -> int:
        """Ranks to start on each node, for a grid of at least `least`.

        Raises:
            GridError: nodes can't have equally many of them.
        """
        if self.ranks is not None:
            return self.ranks
        if least % self.most:
            raise GridError(
                f"a grid of {least} ranks can't be spread evenly over --nnodes {self.most}; state "
                "--nproc-per-node, or parallel.data_parallel_size"
            )
        return least // self.most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says where ranks are started."""
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--nproc",
        dest="nproc",
        type=int,
        metavar="N",
        help="ranks to start here; without it tp x pp x cp x dp by nodes, dp 1 unless stated",
    )
    add(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="nodes of the job, on each of which the same is started; with MIN it goes on with so "
        "few when others are lost; 1 unless stated",
    )
    add("--node-rank", type=int, metavar="I", help="number of this node, 0 to N-1")
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        help="address of node 0, and a port that is free there",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start all ranks again after a crash, up to K times, from the newest sound checkpoint",
    )


def from_arguments(arguments: argparse.Namespace) -> Nodes:
    """
    Raises:
        GridError: naming the option that is missing or can't be.
    """
    if arguments.nnodes is None:
        # Each node would begin the whole run by itself.
        for name in ("node_rank", "rendezvous"):
            if getattr(arguments, name) is not None:
                stated = f"--{name.replace('_', '-')} {getattr(arguments, name)}"
                raise GridError(f"{stated} is of a job of several nodes; state --nnodes too")
    fewest, most = _counts(arguments.nnodes or "1")
    if arguments.nproc is not None and arguments.nproc < 1:
        raise GridError(f"--nproc-per-node {arguments.nproc} starts no ranks; choose at least 1")
    if arguments.max_restarts < 0:
        raise GridError(f"--max-restarts {arguments.max_restarts} must be 0 or more")
    common = {"ranks": arguments.nproc, "max_restarts": arguments.max_restarts}
    if most == 1:
        return Nodes(**common)
    node = arguments.node_rank
    if node is None or not 0 <= node < most:
        stated = "is missing" if node is None else f"{node} isn't there"
        raise GridError(f"--node-rank {stated}; number the nodes from 0 to {most - 1}")
    return Nodes(fewest, most, node, _rendezvous(arguments.rendezvous), **common)


def _counts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    fewest, most = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise GridError(f"--nnodes {text} must be a number of nodes, or MIN:MAX, from 1 on")
    return fewest, most


def _rendezvous(text: str | None) -> Rendezvous:
    if text is None:
        raise GridError("--rendezvous is missing; state HOST:PORT of node 0, alike on all nodes")
    host, _, port = text.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise GridError(f"--rendezvous {text} must be HOST:PORT, such as node01:29500")
    found = Rendezvous(host, int(port))
    try:
        _addresses(found)
    except OSError as error:
        raise GridError(
            f"--rendezvous {text}: {host} has no address here ({error.strerror}); name node 0 as "
            "this machine knows it, or by its IP address"
        ) from None
    return found


def _addresses(where: Rendezvous) -> list[tuple]:
    return socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
