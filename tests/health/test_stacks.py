"""What a rank is doing can be read off its stacks: where it computes, and for whom it waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megagrid.comm.collectives import all_reduce
from megagrid.comm.p2p import Message, post
from megagrid.data.batches import _read_ahead
from megagrid.grid.grid import Grid, build_grid
from megagrid.grid.placement import Placement
from megagrid.health.beat import COMPUTING, DEVICE, WAITING, Doing
from megagrid.health.stacks import StackSampler
from tests.end_to_end.t0 import DP2, PP2, TP2

LATE_S = 1.2


class Looker:
    """Looks at the thread that makes it, every few milliseconds; the last time in `after_s`."""

    def __init__(self, after_s: float, *, has_device: bool = False) -> None:
        self.seen: list[Doing] = []
        self.busy: float | None = None
        self._sampler = StackSampler(has_device=has_device)
        self._after_s = after_s
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        until = time.monotonic() + self._after_s
        while time.monotonic() < until:
            self._sampler.sample()
            time.sleep(0.02)
        self.busy = self._sampler.busy()
        self.seen.append(self._sampler.doing(settled_s=0.3))

    def __enter__(self) -> Looker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


LOOKS_WHILE_GARBAGE_IS_COLLECTED = """
import gc, sys, threading, time
from megagrid.health.stacks import StackSampler

sampler = StackSampler(has_device=False)

def look():
    for _ in range(200):
        sampler.sample()
        sampler.doing(settled_s=0.0)

looker = threading.Thread(target=look)

def let_others_run(phase, info):
    if threading.current_thread() is looker:
        time.sleep(0.001)

gc.callbacks.append(let_others_run)
gc.set_threshold(5)

def down(depth, *more):
    return up(depth - 1, depth, *more) if depth else len(more)

def up(depth, *more):
    a = b = c = more
    return down(depth - 1, *a, *b[:2]) + len(c) if depth else 0

looker.start()
while looker.is_alive():
    for depth in range(12):
        down(depth)
assert gc.isenabled()
"""


def test_a_look_survives_the_garbage_collector():
    """In a process of its own, for CPython 3.11 might crash, as it did within a look or two."""
    program = [sys.executable, "-X", "faulthandler", "-c", LOOKS_WHILE_GARBAGE_IS_COLLECTED]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr


def outer_loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        inner_work()


def inner_work() -> int:
    return sum(range(1000))


def test_the_innermost_function_that_has_been_there_for_a_while_is_named():
    with Looker(0.8) as looker:
        begun = time.time()
        outer_loop(1.2)
    (doing,) = looker.seen
    assert (doing.kind, doing.what) in {(COMPUTING, "outer_loop"), (COMPUTING, "inner_work")}
    assert doing.where.startswith("tests/health/test_stacks.py:")
    assert begun - 0.1 < doing.since < begun + 0.3
    assert looker.busy == 1.0


def test_a_wait_for_data_is_put_down_to_the_thread_that_reads():
    def reads():
        slow_read()
        yield 1

    with Looker(0.8) as looker:
        assert list(_read_ahead(reads(), 1)) == [1]
    (doing,) = looker.seen
    assert (doing.kind, doing.what) == (COMPUTING, "slow_read")


def slow_read() -> None:
    time.sleep(1.2)


@pytest.mark.gpu
def test_a_rank_that_waits_for_its_device_is_not_at_work():
    device = torch.accelerator.current_accelerator()
    busy = torch.ones(8192, 8192, device=device)
    with Looker(0.5, has_device=True) as looker:
        for _ in range(400):
            busy = busy @ busy
        busy.sum().item()
    assert [doing.kind for doing in looker.seen] == [DEVICE]


def reduce_along_tp(grid: Grid) -> None:
    all_reduce(torch.ones(4), grid.tp)


def receive_along_pp(grid: Grid) -> None:
    message = Message(torch.ones(4), peer=1 - grid.pp.rank, is_send=grid.rank == 1)
    (pending,) = post([message], grid.pp)
    pending.wait()


def gather_along_dp(grid: Grid) -> None:
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, mesh=DeviceMesh.from_group(grid.dp.group, "cpu"))
    layer(torch.ones(1, 4))


def wait_for_a_late_rank(placement: Placement, work) -> tuple[Doing, float] | None:
    """Rank 1 comes late; what rank 0 is seen doing meanwhile, and how much of it as work."""
    grid = build_grid(placement, dist.get_rank(), "cpu", 2)
    dist.barrier()
    if grid.rank == 1:
        time.sleep(LATE_S)
        work(grid)
        return None
    with Looker(0.8 * LATE_S) as looker:
        work(grid)
    return looker.seen[0], looker.busy


@pytest.mark.parametrize(
    ("placement", "work", "collective", "axis"),
    [
        (TP2, reduce_along_tp, "all_reduce", "tp"),
        (PP2, receive_along_pp, "recv", "pp"),
        (DP2, gather_along_dp, "all_gather", "dp"),
    ],
    ids=["tp", "pp", "dp"],
)
def test_a_wait_is_told_with_collective_axis_and_peers(ranks, placement, work, collective, axis):
    (doing, busy), _ = ranks.run(wait_for_a_late_rank, placement, work, world_size=2)
    assert (doing.kind, doing.axis, doing.peers) == (WAITING, axis, (1,))
    assert doing.what.startswith(collective)
    assert busy < 0.3
