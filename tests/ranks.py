"""A pool of rank processes that live as long as the test session.

Importing torch costs a process some seconds, a call to the pool a few hundredths of one:

    def sum_of_ranks(scale):
        x = torch.tensor(float(dist.get_rank() * scale))
        dist.all_reduce(x)
        return x.item()

    def test_all_reduce_adds(ranks):
        assert ranks.run(sum_of_ranks, 10, world_size=4) == [60.0] * 4

Every call gets a default process group of its own, made anew on the same processes, so the code
under test may call `new_group` and break its groups as it likes, and no call sees what another
left behind. On two cores that costs some 5 ms to make it and 20 ms, gloo's own, to take it down;
keeping groups per world size would save less than it would let through.

    test process                     each rank
      call(function, world)    →       make the default group, run the function
                               ←       outcome: result, or traceback and time
      release                  →       take the group down
                               ←       idle

A rank whose function returned keeps its group until the release, since closing its sockets could
cut off peers that are still reading. A rank whose function raised takes its group down at once:
that is what frees peers which wait for it. A rank that isn't idle soon after is killed, and a
fresh one takes its place at the next call.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

# torch is imported inside functions: the fork server preloads it once for all ranks, and a test
# run that needs no rank pays nothing.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest"]

TIMEOUT_SECONDS = 90.0
"""Bound of one call. Every test on the pool is meant to take far less."""

GRACE_SECONDS = 10.0
"""After the first failure of a call, how long the other ranks have to notice and become idle.
A closed gloo connection is seen in 0.1 s; the rest is room for a busy machine."""

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks. Not SIGUSR1 or SIGTERM, which the code under test handles."""


class RanksError(AssertionError):
    """A call to the pool failed on some rank.

    Attributes:
        failures: rank -> its traceback, or what became of it. The message shows the earliest
            in full, since later ones are mostly peers that lost their connection to it.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class Call:
    """What a rank is asked to do.

    Attributes:
        task: pickled (function, args, kwargs); unpickled where its errors can be reported.
        name: a prefix in the store that no other call has.
        timeout: of the group's collectives, in seconds. Longer than the call's, so that a hang is
            reported by the pool, with stacks.
    """

    task: bytes
    name: str
    rank: int
    world_size: int
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """What a rank answers. `result` is pickled; `error` is a traceback or None.

    `time` is of the system-wide monotonic clock, so that the outcomes of ranks can be ordered.
    """

    result: bytes
    error: str | None
    time: float


class Idle:
    """A rank's word that its groups are down and it takes the next call."""


class Release:
    """The test process's word that no rank needs its peers any more."""


class Ranks:
    """Processes 0 … limit-1, started when first needed. Use as a context manager."""

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._workers: dict[int, Worker] = {}
        self._calls = 0
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._store: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout: float = TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on ranks 0 … world_size-1, each in the same new world.

        The default process group (gloo) is that world, so `dist.get_rank()` says who one is. What
        goes in and out is pickled: the function stands at the top of a module.

        Returns:
            The results in rank order.

        Raises:
            RanksError: with the remote traceback, if the function raised or its process died on
                any rank; with every unfinished rank's stacks, if the timeout passed.
        """
        if not 1 <= world_size <= self._limit:
            raise ValueError(f"world_size={world_size} must be between 1 and {self._limit}")
        task = _pickle_task(function, args, kwargs)
        workers = [self._worker(rank) for rank in range(world_size)]
        self._calls += 1
        try:
            for rank, worker in enumerate(workers):
                worker.send(Call(task, f"call{self._calls}", rank, world_size, 2 * timeout))
            outcomes = _collect(workers, timeout)
        except BaseException:  # Ctrl-C or a fault of the pool: nobody knows the ranks' state
            self._discard(workers)
            raise
        self._discard([worker for worker in workers if not worker.idle])
        failures = {r: o for r, o in enumerate(outcomes) if o.error is not None}
        if failures:
            name = getattr(function, "__qualname__", repr(function))
            raise RanksError(
                _describe(name, world_size, failures),
                {rank: str(outcome.error) for rank, outcome in failures.items()},
            )
        return [pickle.loads(outcome.result) for outcome in outcomes]

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that have been started."""
        return {rank: worker.process.pid for rank, worker in self._workers.items()}

    def close(self) -> None:
        """End every rank. The pool can't be used afterwards."""
        self._discard(list(self._workers.values()))
        self._store = None
        self._folder.cleanup()

    def _worker(self, rank: int) -> Worker:
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive():
            worker = Worker(self._context, rank, self._store_port(), Path(self._folder.name))
            self._workers[rank] = worker
        return worker

    def _store_port(self) -> int:
        """Port of the key-value store through which ranks find one another.

        It lives here, as any rank may be killed.
        """
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.kill()
            if self._workers.get(worker.rank) is worker:
                del self._workers[worker.rank]


class Worker:
    """The test process's end of one rank."""

    def __init__(self, context: Any, rank: int, port: int, folder: Path) -> None:
        self.rank = rank
        self.idle = True
        self.connection, theirs = context.Pipe()
        self._stacks = folder / f"stacks-{rank}"
        self.process = context.Process(
            target=_serve,
            args=(theirs, port, str(self._stacks)),
            name=f"rank{rank}",
            daemon=True,
        )
        self.process.start()
        theirs.close()  # so that the rank's death is the end of the connection

    def send(self, message: object) -> None:
        self.idle = False
        try:
            self.connection.send(message)
        except OSError:
            pass  # it died; reading from the connection will say so

    def receive(self) -> Outcome | Idle | None:
        """The next message, or None if the process has died."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return None
        self.idle = isinstance(message, Idle)
        return message

    def epitaph(self) -> str:
        """How the process ended, with the stacks that faulthandler left if it crashed."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return f"the process died ({how})\n{self._stacks_written()}".rstrip()

    def stopped(self, why: str) -> Outcome:
        """End the process and say where it was."""
        stacks = self._stacks_now()
        self.kill()
        return Outcome(b"", f"{why}\n{stacks}", time.monotonic())

    def _stacks_now(self) -> str:
        """Ask the process where it is. Works while it is blocked in a collective."""
        before = len(self._stacks_written())
        try:
            os.kill(self.process.pid, DUMP_SIGNAL)
        except ProcessLookupError:
            return ""
        text = ""
        for _ in range(50):  # the dump has no end mark: read until it has stopped growing
            time.sleep(0.1)
            former, text = text, self._stacks_written()[before:]
            if text and text == former:
                break
        return text

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()

    def _stacks_written(self) -> str:
        return self._stacks.read_text() if self._stacks.exists() else ""


def _collect(workers: list[Worker], timeout: float) -> list[Outcome]:
    """Wait until every rank is idle again, dead or out of time; one outcome per rank."""
    outcomes: dict[int, Outcome] = {}
    busy = {worker.connection: worker for worker in workers}

    deadline = time.monotonic() + timeout
    while len(outcomes) < len(workers) and not any(o.error for o in outcomes.values()):
        if not _receive(busy, outcomes, deadline):
            for worker in list(busy.values()):
                if worker.rank not in outcomes:
                    outcomes[worker.rank] = worker.stopped(f"did not finish in {timeout:g} s")
                    del busy[worker.connection]

    for worker in busy.values():
        worker.send(Release())
    deadline = time.monotonic() + GRACE_SECONDS
    while busy and _receive(busy, outcomes, deadline):
        pass
    for worker in busy.values():
        if worker.rank not in outcomes:
            outcomes[worker.rank] = worker.stopped("went on although another rank had failed")
        elif outcomes[worker.rank].error is None:
            outcomes[worker.rank] = worker.stopped("returned with an operation still pending")
    return [outcomes[worker.rank] for worker in workers]


def _receive(
    busy: dict[connection.Connection, Worker], outcomes: dict[int, Outcome], deadline: float
) -> bool:
    """Take the messages that come next; False if none has come by the deadline."""
    ready = connection.wait(list(busy), timeout=max(0.0, deadline - time.monotonic()))
    for conn in ready:
        worker = busy[conn]
        message = worker.receive()
        if isinstance(message, Outcome):
            outcomes[worker.rank] = message
            continue
        del busy[conn]
        if message is None:
            outcomes[worker.rank] = Outcome(b"", worker.epitaph(), time.monotonic())
    return bool(ready)


def _describe(name: str, world_size: int, failures: dict[int, Outcome]) -> str:
    """The earliest failure in full, the last line of the others; all in full if all timed out."""
    order = sorted(failures, key=lambda rank: failures[rank].time)
    errors = {rank: str(failures[rank].error) for rank in order}
    if all("did not finish" in error for error in errors.values()):
        full, brief = order, []
    else:
        full, brief = order[:1], order[1:]
    lines = [f"{name} failed on {len(order)} of {world_size} ranks"]
    lines += [f"--- rank {rank}: {errors[rank].rstrip()}" for rank in full]
    lines += [f"--- then rank {rank}: {_summary(errors[rank])}" for rank in brief]
    return "\n".join(lines)


def _summary(error: str) -> str:
    """The line of a traceback that names the exception; else the first line."""
    *_, last = error.strip().split("Traceback (most recent call last):\n")
    return next(line for line in last.splitlines() if not line.startswith(" "))


def _pickle_task(function: Callable[..., Any], args: tuple, kwargs: dict) -> bytes:
    try:
        # Plain pickle, by value. multiprocessing's own would pass tensors as shared memory, and a
        # rank that changes its argument would change it for the others.
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"ranks.run can't send {function!r} with its arguments to another process ({error}); "
            "use a function at the top of a module and arguments that pickle"
        ) from error


# ------------------------------------------------------------------------------------------------
# What follows runs in the rank processes.


def _serve(conn: connection.Connection, port: int, stacks_path: str) -> None:
    """Main of a rank: take calls until the test process closes the connection."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's to handle
    stacks = open(stacks_path, "w")  # noqa: SIM115 - faulthandler holds it for life
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks)
    _use_loopback()

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()  # what the imports made is never garbage: collecting between calls stays cheap
    while True:
        try:
            call = conn.recv()
        except EOFError:
            return
        with _state_restored():
            outcome = _attempt(call, store)
            conn.send(outcome)
            if outcome.error is None:
                conn.recv()  # Release
                _take_down()
            else:
                _take_down()
                conn.recv()
        conn.send(Idle())


def _attempt(call: Call, store: Any) -> Outcome:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(call.name, store),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )
        function, args, kwargs = pickle.loads(call.task)
        result, error = pickle.dumps(function(*args, **kwargs)), None
    except BaseException:  # SystemExit too: a rank that leaves is a failure of the call
        result, error = b"", traceback.format_exc()
    return Outcome(result, error, time.monotonic())


def _take_down() -> None:
    """Close every group. Those that only garbage refers to would keep threads and sockets.

    DTensor remembers what its ops return, device mesh included; a mesh of the next call that
    looks the same would be taken for this one's, whose groups are gone.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _state_restored():
    """Each call starts from, and leaves, the same process-wide state."""
    import torch

    environment = dict(os.environ)
    folder = Path.cwd()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    try:
        yield
    finally:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()  # compiled code counts against a limit of its own
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """However the test process ends, its ranks end too, even inside a collective."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _use_loopback() -> None:
    """gloo otherwise asks the host's name for an address, which sandboxes can't resolve."""
    names = {name for _, name in socket.if_nameindex()}
    for name in names & {"lo", "lo0"}:
        os.environ["GLOO_SOCKET_IFNAME"] = name
