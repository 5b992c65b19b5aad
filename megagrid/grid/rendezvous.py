"""Where the ranks of a run meet, before there is a process group: a store, and what is said there.

    torchrun        the agent of the first node keeps the store, at MASTER_ADDR and MASTER_PORT
    SLURM           task 0 keeps it at a port that the system chooses, and leaves word in a file

Rank 0 posts the number of this attempt to meet; the others answer it, each with a number of its
own; rank 0 posts all answers, with what it makes of them. A rank that finds its own number there
knows that everybody is there now. Otherwise it has read what an earlier attempt has left in the
store, for torchrun's agent keeps one store over restarts, and looks again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megagrid.errors import GridError, MegagridError, PeerError, UnavailableError
from megagrid.grid.bootstrap import RankEnvironment

FOLDER = ".rendezvous"
"""In the run's folder; holds a file only while ranks look for each other."""

STALE_SECONDS = 86_400.0
"""Nobody waits for as long, so that a file that old was left by a job that ended too early."""

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_CONCLUDE = 2.0
"""After so long without a conclusion, what rank 0 has posted may be of an earlier attempt."""

SECONDS_TO_LEAVE = 10.0

_HELLO = "megagrid/attempt"

Word = dict[str, Any]
"""What a rank says, and what is said of all of them; as JSON."""


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other, and which key says so."""

    seconds: float
    key: str

    def __str__(self) -> str:
        return f"{self.key}={self.seconds:g}"


@contextmanager
def store_of(
    environment: RankEnvironment, folder: Path, patience: Patience
) -> Iterator[dist.Store]:
    """The store of the run's ranks, kept until all of them have left it, unless the block fails.

    Args:
        folder: the run's, which all nodes see.

    Raises:
        GridError: an address that doesn't resolve or isn't this node's.
        UnavailableError: a port that is taken, nobody there in time.
    """
    if environment.world_size == 1:
        yield dist.HashStore()
        return
    if environment.master_address is not None:
        store = _stated_store(environment, patience)
    elif environment.rank == 0:
        store = _own_store(environment, folder, patience)
    else:
        store = _found_store(environment, folder, patience)
    yield store
    _leave(store, environment)


def meet(
    store: dist.Store,
    environment: RankEnvironment,
    word: Word,
    conclude: Callable[[list[Word]], Word],
    patience: Patience,
) -> tuple[dist.Store, Word]:
    """Tell all ranks `word`, and hear what rank 0 concludes of the words of all.

    Returns:
        a part of the store that this attempt has for itself, and the conclusion.

    Raises:
        GridError: on every rank, if `conclude` raises one on rank 0.
        UnavailableError: not all came in time.
        PeerError: rank 0 is gone.
    """
    if environment.rank == 0:
        attempt, result = _gather(store, environment, word, conclude, patience)
    else:
        attempt, result = _answer(store, environment, word, patience)
    if "error" in result:
        _leave(store, environment)
        error = GridError(result["error"])
        error.is_mine_to_tell = environment.rank == 0
        raise error
    return dist.PrefixStore(f"megagrid/{attempt}/run", store), result


@contextmanager
def told_by_one(store: dist.Store) -> Iterator[None]:
    """Of the ranks that meet a mistake in the block, all or some, let the first one tell it."""
    try:
        yield
    except MegagridError as error:
        error.is_mine_to_tell = False
        with contextlib.suppress(dist.DistError):  # rank 0 has gone with the store, having told it
            error.is_mine_to_tell = store.add("told", 1) == 1
        raise


def forget(environment: RankEnvironment, folder: Path) -> None:
    """Remove the word that rank 0 has left for the others, all of whom have come."""
    if environment.rank == 0 and environment.step is not None:
        _word_path(environment, folder).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run's ranks look for each other there
            (folder / FOLDER).rmdir()


def _gather(
    store: dist.Store,
    environment: RankEnvironment,
    word: Word,
    conclude: Callable[[list[Word]], Word],
    patience: Patience,
) -> tuple[str, Word]:
    attempt = secrets.token_hex(8)
    store.set(_HELLO, attempt)
    keys = [f"megagrid/{attempt}/{rank}" for rank in range(1, environment.world_size)]
    if not _are_there(store, keys, patience.seconds):
        missing = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
        raise UnavailableError(
            f"rank 0 on {environment.host} waited for {_ranks(missing)} of "
            f"{environment.world_size} longer than {patience}; see what their logs say, or raise it"
        )
    words = [{"says": word, "number": ""}, *(json.loads(text) for text in store.multi_get(keys))]
    try:
        result = conclude([one["says"] for one in words])
    except GridError as error:
        result = {"error": str(error)}
    numbers = [one["number"] for one in words]
    store.set(f"megagrid/{attempt}/all", json.dumps({"result": result, "numbers": numbers}))
    return attempt, result


def _answer(
    store: dist.Store, environment: RankEnvironment, word: Word, patience: Patience
) -> tuple[str, Word]:
    number, deadline = secrets.token_hex(8), time.monotonic() + patience.seconds
    answer = json.dumps({"says": word, "number": number})
    try:
        while (left := deadline - time.monotonic()) > 0 and _are_there(store, [_HELLO], left):
            attempt = store.get(_HELLO).decode()
            store.set(f"megagrid/{attempt}/{environment.rank}", answer)
            if not _are_there(store, [f"megagrid/{attempt}/all"], min(left, SECONDS_TO_CONCLUDE)):
                continue
            told = json.loads(store.get(f"megagrid/{attempt}/all"))
            if told["numbers"][environment.rank : environment.rank + 1] == [number]:
                return attempt, told["result"]
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except dist.DistError as error:
        raise PeerError(
            f"rank {environment.rank} on {environment.host} lost rank 0 before all ranks had met: "
            f"{str(error).splitlines()[0]}"
        ) from error
    raise UnavailableError(
        f"rank {environment.rank} on {environment.host} waited for the other "
        f"{environment.world_size - 1} longer than {patience}; see what their logs say, or raise it"
    )


def _are_there(store: dist.Store, keys: list[str], timeout: float) -> bool:
    """Whether all `keys` are set within so many seconds. A wait by the store itself would warn of
    each that takes too long."""
    deadline, pause = time.monotonic() + timeout, 0.005
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, SECONDS_BETWEEN_LOOKS)
    return True


def _leave(store: dist.Store, environment: RankEnvironment) -> None:
    """Who keeps the store waits for the others: some ask it for something to their last moment."""
    if environment.has_agent_store:
        return
    with contextlib.suppress(dist.DistError):  # of a peer that is gone
        if environment.rank != 0:
            store.add("megagrid/left", 1)
        else:
            deadline = time.monotonic() + SECONDS_TO_LEAVE
            others = environment.world_size - 1
            while store.add("megagrid/left", 0) < others and time.monotonic() < deadline:
                time.sleep(0.01)


# --- Where it is ---------------------------------------------------------------------------------


def _stated_store(environment: RankEnvironment, patience: Patience) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, kept by torchrun's agent or by rank 0."""
    address, port = environment.master_address, environment.master_port
    stated = f"MASTER_ADDR={address} MASTER_PORT={port}"
    check_resolves(address, environment, "MASTER_ADDR")
    if not 0 < port < 2**16:
        raise GridError(f"MASTER_PORT={port} must be a port, 1 to 65535")
    keeps = environment.rank == 0 and not environment.has_agent_store
    if keeps and environment.step is not None and not _is_mine(address):
        raise GridError(
            f"MASTER_ADDR={address} is no address of {environment.host}, where rank 0 is; name "
            "that node, or unset MASTER_ADDR and MASTER_PORT: ranks of SLURM find each other"
        )
    how = {"is_master": keeps, "wait_for_workers": False, "multi_tenant": True}
    try:
        if store := _within(patience.seconds, partial(dist.TCPStore, address, port, **how)):
            return store
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UnavailableError(
                f"{stated}: another program on {environment.host} has that port; choose one that "
                "is free"
            ) from None
    raise UnavailableError(
        f"rank {environment.rank} on {environment.host} met nobody at {stated} within "
        f"{patience}; see whether rank 0 is there, or raise it"
    )


def _own_store(environment: RankEnvironment, folder: Path, patience: Patience) -> dist.Store:
    """Open a store here and leave word of it, complete or not at all."""
    address = _own_address(environment)
    # Port 0: the system chooses one that is free, whatever else there is on this node.
    store = dist.TCPStore(
        address,
        0,
        is_master=True,
        timeout=timedelta(seconds=patience.seconds),
        wait_for_workers=False,
    )
    mark = secrets.token_hex(8)
    store.set("megagrid/mark", mark)
    path = _word_path(environment, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        passing = path.with_suffix(".new")
        word = {"address": address, "port": store.port, "mark": mark}
        passing.write_text(json.dumps(word), encoding="utf-8")
        os.replace(passing, path)
    except OSError as error:
        raise UnavailableError(
            f'logging.run_dir="{folder}" can\'t be written to ({error.strerror}); name another'
        ) from None
    return store


def _found_store(environment: RankEnvironment, folder: Path, patience: Patience) -> dist.Store:
    """The store that rank 0 has left word of, as soon as it is there."""
    path, seen = _word_path(environment, folder), "there is no such file"
    deadline = time.monotonic() + patience.seconds
    while time.monotonic() < deadline:
        # A shared disk may go on saying that there is no such file; looking into its folder makes
        # it ask anew.
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        with contextlib.suppress(FileNotFoundError):
            word = json.loads(path.read_text(encoding="utf-8"))
            check_resolves(word["address"], environment, str(path))
            if store := _connect(word, patience):
                return store
            seen = f"nobody listens at {word['address']} port {word['port']}, as it says"
        time.sleep(SECONDS_BETWEEN_LOOKS)
    raise UnavailableError(
        f"rank {environment.rank} on {environment.host} looked for rank 0's word in {path} for "
        f"{patience}, but {seen}; logging.run_dir must be on a disk that "
        "all nodes see, or state MASTER_ADDR and MASTER_PORT"
    )


def _connect(word: Word, patience: Patience) -> dist.Store | None:
    """The store that `word` tells of; None if it is another's by now, or nobody's."""
    place = word["address"], word["port"]
    try:
        socket.create_connection(place, timeout=SECONDS_TO_CONNECT).close()
        store = _within(SECONDS_TO_CONNECT, partial(dist.TCPStore, *place, wait_for_workers=False))
        if store is None or not store.check(["megagrid/mark"]):
            return None
        if store.get("megagrid/mark").decode() != word["mark"]:
            return None
    except (OSError, dist.DistError):
        return None
    store.set_timeout(timedelta(seconds=patience.seconds))
    return store


def _within(seconds: float, make: Callable[..., dist.Store]) -> dist.Store | None:
    """What `make(timeout=…)` makes; None if it takes longer.

    torch waits without end for the first answer of a program that listens and says nothing, which
    is no store.
    """
    made: list[dist.Store | dist.DistError] = []

    def work() -> None:
        try:
            made.append(make(timeout=timedelta(seconds=seconds)))
        except dist.DistError as error:
            made.append(error)

    thread = threading.Thread(target=work, name="store", daemon=True)
    thread.start()
    thread.join(seconds + 1.0)
    if made and isinstance(made[0], dist.DistError):
        raise made[0]
    return made[0] if made else None


def _word_path(environment: RankEnvironment, folder: Path) -> Path:
    return folder / FOLDER / f"{environment.step}.json"


def _remove_stale(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


# --- Addresses -----------------------------------------------------------------------------------


def check_resolves(address: str, environment: RankEnvironment, stated: str) -> None:
    """
    Raises:
        GridError: this node doesn't know the name. torch would only try again and again.
    """
    if not _resolves(address):
        raise GridError(
            f"{stated} names {address}, which {environment.host} can't resolve; enter it in DNS or "
            "/etc/hosts, or state an address by MASTER_ADDR and MASTER_PORT"
        )


def _own_address(environment: RankEnvironment) -> str:
    """A name of this node by which others reach it."""
    names = [environment.host, socket.gethostname(), socket.getfqdn()]
    for name in names:
        if _resolves(name):
            return name
    raise GridError(
        f"neither name of rank 0's node resolves there ({', '.join(dict.fromkeys(names))}); enter "
        "one in DNS or /etc/hosts, or state MASTER_ADDR and MASTER_PORT"
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _is_mine(name: str) -> bool:
    """Whether it is a name of this machine: others' addresses can't be bound to."""
    for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as bound:
            bound.bind(address)
            return True
    return False


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
