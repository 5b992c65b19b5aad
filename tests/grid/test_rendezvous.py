"""Ranks that look for each other, each in a thread."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megagrid.errors import GridError
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.rendezvous import FOLDER, STALE_SECONDS, Patience, Word, forget, meet, store_of

SECONDS = 20.0


def task(rank: int, size: int, step: str = "mini-1500.0-0") -> RankEnvironment:
    """Of a step of SLURM's, on nodes that are all this machine."""
    return RankEnvironment(rank, size, local_rank=rank, host="localhost", step=step)


def say_all(words: list[Word]) -> Word:
    return {"heard": [word["name"] for word in words]}


def come(
    environment: RankEnvironment,
    folder: Path,
    name: str = "",
    conclude: Callable[[list[Word]], Word] = say_all,
    seconds: float = SECONDS,
) -> Word:
    """What a rank hears, having said its name; and that it can talk to the others."""
    word = {"name": name or environment.rank}
    patience = Patience(seconds, "train.setup_timeout_seconds")
    with store_of(environment, folder, patience) as store:
        store, heard = meet(store, environment, word, conclude, patience)
        forget(environment, folder)
        assert store.add("count", 1) <= environment.world_size
        return heard


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The result of each call, or its error."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))


def all_of(step: str, size: int, folder: Path, **how: Any) -> list[Callable[[], Word]]:
    return [
        lambda rank=rank: come(task(rank, size, step), folder, f"{step}/{rank}", **how)
        for rank in range(size)
    ]


def test_ranks_find_each_other_and_leave_no_word_behind(tmp_path):
    found = together(*all_of("mini-1500.0-0", 4, tmp_path))
    assert found == [{"heard": [f"mini-1500.0-0/{rank}" for rank in range(4)]}] * 4
    assert list(tmp_path.iterdir()) == []


def test_jobs_and_steps_on_one_host_at_once_dont_meet(tmp_path):
    """Whatever a port made of their numbers would be, and even in one folder."""
    steps = ["mini-1500.0-0", "mini-2500.0-0", "mini-1500.1-0"]
    found = together(*(call for step in steps for call in all_of(step, 2, tmp_path)))
    for step in steps:
        assert found.count({"heard": [f"{step}/0", f"{step}/1"]}) == 2


@contextmanager
def listening(kind: str) -> Iterator[int]:
    """A port with something else on it."""
    if kind == "nobody":
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        yield port
    elif kind == "another program":
        with socket.create_server(("", 0)) as server:
            yield server.getsockname()[1]
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store.set("megagrid/mark", "its own")
        yield store.port


@pytest.mark.parametrize("kind", ["nobody", "another program", "another run"])
def test_word_of_a_job_with_the_same_name_that_was_killed_misleads_nobody(tmp_path, kind):
    path = tmp_path / FOLDER / "mini-1500.0-0.json"
    path.parent.mkdir()
    with listening(kind) as port:
        path.write_text(json.dumps({"address": "localhost", "port": port, "mark": "an old one"}))
        rank_0, rank_1 = all_of("mini-1500.0-0", 2, tmp_path)

        def late() -> Word:
            time.sleep(0.5)
            return rank_0()

        assert together(late, rank_1) == [{"heard": ["mini-1500.0-0/0", "mini-1500.0-0/1"]}] * 2


def test_words_that_nobody_waits_for_any_more_are_removed(tmp_path):
    old, new = (tmp_path / FOLDER / f"mini-{job}.0-0.json" for job in (7, 8))
    old.parent.mkdir()
    old.write_text("{}")
    new.write_text("{}")
    then = time.time() - STALE_SECONDS - 1
    os.utime(old, (then, then))
    together(*all_of("mini-1500.0-0", 2, tmp_path))
    assert list(old.parent.iterdir()) == [new]


def told(result: Any) -> str:
    assert isinstance(result, GridError), result
    assert "\n" not in str(result)
    return str(result)


def test_a_rank_that_finds_no_word_names_the_file_it_looked_for(tmp_path):
    (_, rank_1) = all_of("mini-1500.0-0", 2, tmp_path, seconds=0.3)
    message = told(together(rank_1)[0])
    assert (
        f"{tmp_path}/.rendezvous/mini-1500.0-0.json for train.setup_timeout_seconds=0.3" in message
    )
    assert "there is no such file; logging.run_dir must be on a disk that all nodes see" in message


def test_rank_0_names_those_that_havent_come(tmp_path):
    calls = all_of("mini-1500.0-0", 4, tmp_path, seconds=1.0)
    error, _ = together(calls[0], calls[2])
    message = told(error)
    assert error.exit_code == 69
    assert message.startswith("rank 0 on localhost waited for ranks 1, 3 of 4 longer than train.s")


def test_what_rank_0_refuses_is_refused_by_all_and_told_by_it(tmp_path):
    def refuse(words: list[Word]) -> Word:
        raise GridError("no")

    found = together(*all_of("mini-1500.0-0", 3, tmp_path, conclude=refuse))
    assert [told(error) for error in found] == ["no"] * 3
    assert [error.is_mine_to_tell for error in found] == [True, False, False]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_are_restarted_meet_anew_in_the_agents_store(tmp_path, first):
    """It still has what those before them have said; `first` comes before the other."""
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environments = [
        replace(
            task(rank, 2),
            step=None,
            master_address="localhost",
            master_port=agent.port,
            has_agent_store=True,
        )
        for rank in range(2)
    ]
    for attempt in range(3):

        def call(rank: int, attempt: int = attempt) -> Word:
            if rank != first:
                threading.Event().wait(0.3)
            return come(environments[rank], tmp_path, f"{attempt}/{rank}")

        found = together(lambda: call(0), lambda: call(1))
        assert found == [{"heard": [f"{attempt}/0", f"{attempt}/1"]}] * 2


def stated(rank: int, address: str, port: int) -> RankEnvironment:
    return replace(task(rank, 2), master_address=address, master_port=port)


def test_rank_0_keeps_the_store_at_a_stated_address(tmp_path):
    with listening("nobody") as port:
        found = together(
            *(lambda rank=rank: come(stated(rank, "localhost", port), tmp_path) for rank in (0, 1))
        )
    assert found == [{"heard": [0, 1]}] * 2


@pytest.mark.parametrize(
    ("address", "port", "says"),
    [
        ("nowhere.invalid", 29500, "MASTER_ADDR names nowhere.invalid, which localhost can't"),
        ("192.0.2.1", 29500, "MASTER_ADDR=192.0.2.1 is no address of localhost, where rank 0 is"),
        ("localhost", 99999, "MASTER_PORT=99999 must be a port"),
    ],
)
def test_a_stated_address_that_cant_be_kept_is_refused_at_once(tmp_path, address, port, says):
    assert says in told(together(lambda: come(stated(0, address, port), tmp_path))[0])


@pytest.mark.parametrize("kind", ["nobody", "another program"])
def test_a_rank_that_meets_nobody_at_a_stated_address_says_so_in_time(tmp_path, kind):
    with listening(kind) as port:
        call = partial(come, stated(1, "localhost", port), tmp_path, seconds=0.3)
        message = told(together(call)[0])
    assert f"rank 1 on localhost met nobody at MASTER_ADDR=localhost MASTER_PORT={port}" in message


def test_a_stated_port_that_is_taken_is_named(tmp_path):
    with listening("another program") as port:
        message = told(together(lambda: come(stated(0, "localhost", port), tmp_path))[0])
    assert f"MASTER_PORT={port}: another program on localhost has that port" in message
