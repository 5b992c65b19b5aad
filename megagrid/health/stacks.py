"""What this process is doing, as the stacks of its threads show: no code that computes or
communicates takes part in it.

    stack of a rank in a forward             since        what is made of it
    Run.run                                  12:00:01
    Executor.run                             12:00:07     the innermost that has been there for a
    Linear.forward                           12:00:09     while says where a rank is stuck
    all_reduce         megagrid.comm         12:00:09
    all_reduce         torch.distributed     12:00:09     innermost: it waits in a collective

A stack is told from the one before by the identities of its frames. No frame is kept, and locals,
which name a collective's group, are read only of a rank that has stood still: CPython keeps what it
has shown of a frame's locals for as long as the frame lives.
"""

from __future__ import annotations

import gc
import linecache
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import PurePath
from types import FrameType

import torch.distributed as dist

from megagrid.grid.grid import Axis
from megagrid.health.beat import COMPUTING, DEVICE, WAITING, Doing

C10D = "torch.distributed.distributed_c10d"
MEETS = "megagrid.grid.rendezvous"
JOINS = "torch.distributed.rendezvous"
C10D_CALLS = (C10D, JOINS, "torch.distributed.c10d_logger")
COMMUNICATE = ("megagrid.", "torch.distributed.")
"""Modules in which `.wait()` is that of a message."""

THREADS_WAIT_IN = ("threading", "queue", "concurrent.futures._base")
FOLLOWED = {"megagrid.data.batches": "batches", "megagrid.train.saving": "save"}
"""Names of the threads that these modules wait for begin so."""

IN_BACKWARD = "_engine_run_backward"
"""The function in which a thread waits for autograd, whose threads are its own on accelerators."""

WAITS = re.compile(r"\.wait\(|wait_tensor\(")
WAITS_FOR_DEVICE = re.compile(r"\.(item|tolist|cpu|numpy|synchronize|wait)\(")

GROUPS = ("group", "process_group", "pg", "reduce_scatter_group")
"""Locals of torch's that hold the group of a collective."""

DEPTH = 25
"""Frames, from the innermost on, that are searched for the axis of a collective."""


class StackSampler:
    """Looks at the thread that makes it, which is the one that trains, from another thread.

    Args:
        has_device: whether it computes on one that does so by itself, after it has been told to.
        clock: seconds since the epoch.
    """

    def __init__(self, *, has_device: bool, clock: Callable[[], float] = time.time) -> None:
        self._has_device = has_device
        self._clock = clock
        self._trainer = threading.get_ident()
        self._chain: list[int] = []
        self._since: list[float] = []
        self._instruction = -1
        self._still_since = clock()
        self._busy = self._samples = 0
        self._kinds: dict[tuple[str, int], str] = {}

    def sample(self) -> None:
        """Look once."""
        with _nothing_collected():
            self._look()

    def _look(self) -> None:
        frames = self._frames()
        if not frames:
            return
        now = self._clock()
        chain = [id(frame) for frame in reversed(frames)]
        same = _shared(chain, self._chain)
        self._since = [*self._since[:same], *[now] * (len(chain) - same)]
        instruction = frames[0].f_lasti
        if same < len(chain) or len(chain) != len(self._chain) or instruction != self._instruction:
            self._still_since = now
        self._chain, self._instruction = chain, instruction
        self._samples += 1
        self._busy += self._kind(frames[0]) == COMPUTING

    def busy(self) -> float | None:
        """Share of the samples since the last call in which it computed; None: there were none."""
        share = self._busy / self._samples if self._samples else None
        self._busy = self._samples = 0
        return share

    def doing(self, settled_s: float) -> Doing:
        """What it is doing.

        Args:
            settled_s: seconds that it must have been somewhere to be asked for more.
        """
        with _nothing_collected():
            self._look()
            return self._seen(settled_s)

    def _seen(self, settled_s: float) -> Doing:
        frames = self._frames()
        if not frames or len(frames) != len(self._since):
            return Doing(COMPUTING, "", since=self._still_since)
        now, kind = self._clock(), self._kind(frames[0])
        places = list(zip(frames, reversed(self._since), strict=True))
        if _module(frames[0]) == MEETS:
            *_, (frame, since) = takewhile(lambda place: _module(place[0]) == MEETS, places)
            return Doing(kind, "the meeting of all ranks", _place(frame), since)
        if kind == COMPUTING:
            settled = [place for place in places if place[1] <= now - settled_s]
            frame, since = next(iter(settled), next(iter(_of_megagrid(places)), places[0]))
            return Doing(kind, _name(frame), _place(frame), since)
        what = next((f for f, _ in _of_megagrid([(f, 0.0) for f in frames])), frames[0])
        doing = Doing(kind, _collective(frames) or _name(what), _place(what), self._still_since)
        if kind == WAITING and now - self._still_since >= settled_s:
            return self._with_peers(doing, frames[:DEPTH])
        return doing

    def _with_peers(self, doing: Doing, frames: list[FrameType]) -> Doing:
        for frame in frames:
            names = frame.f_locals
            owner = names.get("self")
            axis = names.get("axis", getattr(owner, "axis", None))
            message = getattr(owner, "message", None)
            if isinstance(axis, Axis) and message is not None:
                what = "send" if message.is_send else "recv"
                peers = (axis.ranks[message.peer],)
                return replace(doing, what=what, axis=axis.name, peers=peers)
            if isinstance(axis, Axis):
                return _along(doing, axis.name, axis.ranks, axis.ranks[axis.rank])
            for name in GROUPS:
                if (known := _described(names.get(name))) is not None:
                    return _along(doing, *known, dist.get_rank())
        return doing

    def _frames(self) -> list[FrameType]:
        """The stack of what trains, innermost first: of the thread that does, or of the one that it
        waits for."""
        stacks = sys._current_frames()
        frames = _stack(stacks.get(self._trainer))
        if not frames:
            return []
        known = {thread.ident: thread for thread in threading.enumerate()}
        if frames[0].f_code.co_name == IN_BACKWARD:
            foreign = [ident for ident in stacks if _is_foreign(known.get(ident))]
            return next((_stack(stacks[ident]) for ident in foreign), frames)
        if _module(frames[0]) in THREADS_WAIT_IN:
            caller = next((f for f in frames if _module(f) not in THREADS_WAIT_IN), frames[0])
            name = FOLLOWED.get(_module(caller), "")
            for ident, thread in known.items():
                if name and thread.name.startswith(name) and ident in stacks:
                    return _stack(stacks[ident])
        return frames

    def _kind(self, frame: FrameType) -> str:
        """What it is to be in `frame` innermost."""
        module = _module(frame)
        if module in (C10D, JOINS, MEETS):
            return WAITING
        key = frame.f_code.co_filename, frame.f_lineno or 0
        if key not in self._kinds:
            self._kinds[key] = self._kind_of_line(module, linecache.getline(*key))
        return self._kinds[key]

    def _kind_of_line(self, module: str, line: str) -> str:
        if module.startswith(COMMUNICATE) and WAITS.search(line):
            return WAITING
        if self._has_device and WAITS_FOR_DEVICE.search(line) and module not in THREADS_WAIT_IN:
            return DEVICE
        return COMPUTING


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the garbage collector from working, in any thread, while frames are looked at.

    To ask another thread's frame for the one below it makes an object, for which CPython before
    3.12 may collect garbage, at whose end other Python code may run: the frame that was asked for
    has returned meanwhile, and what we get is a piece of memory (python/cpython #106883: or a
    deadlock).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _along(doing: Doing, axis: str, ranks: tuple[int, ...], mine: int) -> Doing:
    """What one does along `axis`, of which it is rank `mine`."""
    return replace(doing, axis=axis, peers=tuple(rank for rank in ranks if rank != mine))


def _described(group: object) -> tuple[str, tuple[int, ...]] | None:
    """Name and ranks of a group; None of what is none, or is still being made."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return None
    return "world" if group.group_desc == "default_pg" else group.group_desc, ranks


def _is_foreign(thread: threading.Thread | None) -> bool:
    """Whether a thread was started by no Python code, as autograd's are."""
    return thread is None or isinstance(thread, threading._DummyThread)


def _stack(frame: FrameType | None) -> list[FrameType]:
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _shared(a: list[int], b: list[int]) -> int:
    """Length of what two lists begin with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _of_megagrid(places: list[tuple[FrameType, float]]) -> Iterator[tuple[FrameType, float]]:
    return (place for place in places if _module(place[0]).startswith("megagrid."))


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname


def _place(frame: FrameType) -> str:
    return f"{PurePath(*PurePath(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def _collective(frames: list[FrameType]) -> str | None:
    """The function of torch.distributed that was called; None where it is no collective's call that
    the innermost frame is in, but a wait for an earlier one."""
    name = None
    for frame in frames:
        if _module(frame) not in C10D_CALLS:
            break
        if _module(frame) == C10D:
            name = frame.f_code.co_name
    return name
