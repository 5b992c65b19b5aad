"""How a run saves: at once or behind its training, how long that took, and what if it fails.

    at once      | step | step | plan, write, commit | step | …
    behind       | step | step | copy | step | step | step | wait, copy | step | …
                                      | plan, write, commit            | plan, …      a thread

Behind the training the same is done as at once, by a thread, on copies of the boxes and a process
group of its own. There is one save at a time: the next waits for it, and so does the run's end.

A save ends alike on every rank, but each rank's thread learns of it in its own time. What follows
from a failure is decided where all ranks do so together: when they save again, at the end of a step
with news of it (`megagrid.train.step.News`), and at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from megagrid.checkpoint import Entry
from megagrid.checkpoint import save as save_checkpoint
from megagrid.checkpoint.buffers import HostBuffers
from megagrid.config.dump import dump
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Grid
from megagrid.train.metrics import SaveRecord
from megagrid.train.state import RunState


@dataclass(frozen=True)
class _Written:
    """What came of a save; `bytes` are those of all files, as the first rank sees them."""

    seconds: float
    bytes: int


@dataclass
class _Save:
    """A save that is under way, or has ended and not been looked at.

    Attributes:
        pause_s: that it has cost the training.
    """

    step: int
    outcome: Future[_Written]
    pause_s: float


class Saver:
    """Saves a run's state, as its recipe says. Every rank has one, and uses it like the others.

    Args:
        checkpoints: the folder that checkpoints lie in.
        extra_files: carried along in each.
        report: told of each checkpoint.
        warn: told of each save that failed and was let go.

    Attributes:
        is_async: whether saves are made behind the training.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        checkpoints: Path,
        *,
        extra_files: Sequence[Path],
        report: Callable[[SaveRecord], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config = config
        self._world = grid.host
        self._checkpoints = checkpoints
        self._extra_files = extra_files
        self._report = report
        self._warn = warn
        settings = config.checkpoint
        # Beside CPUs the copy would double what a run holds in the one memory that there is, and
        # the thread take its cores.
        has_own_memory = grid.device.type != "cpu"
        self.is_async = has_own_memory if settings.async_save is None else settings.async_save
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(1, "save") if self.is_async else None
        self._save: _Save | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way has failed; `settle` says why."""
        save = self._save
        return save is not None and save.outcome.done() and save.outcome.exception() is not None

    def save(self, state: RunState, *, is_last: bool = False) -> None:
        """Save `state` as it is now, after the former save has ended.

        Args:
            is_last: the run ends with it, so that a failure waits for `finish`.

        Raises:
            CheckpointError: the former save has failed, or this one if not behind the training, and
                a failed save is to end the run.
        """
        called = perf_counter()
        self.settle()
        begun = perf_counter()
        step, entries = state.progress.step, state.entries()
        if self.is_async:
            entries = self._buffers.copy(entries)
        trainer_state = state.trainer_state()
        outcome = self._start(lambda: self._write(entries, trainer_state, begun))
        self._save = _Save(step, outcome, pause_s=perf_counter() - called)
        if not (self.is_async or is_last):
            self.settle()

    def report_if_done(self) -> None:
        """Report the save that has ended well meanwhile. Each rank does so by itself."""
        if self._save is not None and self._save.outcome.done() and not self.has_failed:
            self.finish()

    def settle(self) -> None:
        """Wait for the save under way. Collective, as what follows from its failure.

        Raises:
            CheckpointError: it has failed, and that is to end the run.
        """
        try:
            self.finish()
        except CheckpointError as error:
            if self._config.checkpoint.on_failed_save == "end":
                raise
            self._warn(f'{error}; the run goes on, as checkpoint.on_failed_save="continue" says')

    def finish(self) -> None:
        """Wait for the save under way, and report it.

        Raises:
            CheckpointError: it has failed, which no run may end well with.
        """
        if self._save is None:
            return
        wait([self._save.outcome])  # an interrupt leaves it to be waited for by `close`
        save, self._save = self._save, None
        written = save.outcome.result()
        self._report(
            SaveRecord(
                step=save.step,
                is_async=self.is_async,
                pause_s=save.pause_s,
                seconds=written.seconds,
                bytes=written.bytes,
                gb_per_s=written.bytes / written.seconds / 1e9,
            )
        )

    def close(self) -> None:
        """Wait for the save under way, however it and the run end: begun on all ranks, it may well
        become whole although one of them fails."""
        if self._thread is not None:
            self._thread.shutdown()

    def abandon(self) -> None:
        """Leave the save under way to itself: a peer is gone, and the thread may wait for what it
        would have sent for as long as a collective may. It ends with the process."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _start(self, write: Callable[[], _Written]) -> Future[_Written]:
        if self._thread is not None:
            return self._thread.submit(write)
        outcome: Future[_Written] = Future()
        try:
            outcome.set_result(write())
        except Exception as error:
            outcome.set_exception(error)
        return outcome

    def _write(self, entries: Sequence[Entry], trainer_state: dict, begun: float) -> _Written:
        settings = self._config.checkpoint
        path = save_checkpoint(
            self._checkpoints,
            entries,
            trainer_state,
            world=self._world,
            config=dump(self._config),
            extra_files=self._extra_files,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            is_finite=True,
        )
        size = 0
        if self._world.rank == 0:
            size = sum(file.stat().st_size for file in path.iterdir())
        return _Written(perf_counter() - begun, size)
