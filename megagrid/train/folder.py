"""A run's folder, which one run at a time writes to.

    .lock              held by the first rank while the run lasts; says who that is
    ranks/rank-00000   its beats, which tell of it where locks don't: some shared file systems have
                       none, some have locks that other nodes don't see

A job that was requeued or started again may come while its predecessor is still dying, and waits
for it; or while a file server still keeps the lock of a node that has died.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from megagrid.errors import MegagridError, UnavailableError
from megagrid.grid import bootstrap
from megagrid.grid.bootstrap import Job
from megagrid.health.beat import STALE_BEATS, Beat, beat_file, read_beat
from megagrid.terminal import warn_on_stderr

LOCK = ".lock"

SECONDS_TO_DIE = 120.0
"""That a job which starts again has patience with the run before it. File servers commonly keep the
locks of a node that is gone for one and a half minutes."""

SECONDS_BETWEEN_LOOKS = 0.25


def lock_folder(
    folder: Path,
    job: Job | None = None,
    patience_s: float = SECONDS_TO_DIE,
    warn: Callable[[str], None] = warn_on_stderr,
) -> TextIO:
    """Make `folder` and keep other runs out of it until what this returns is closed.

    The system lets go of the lock when the process ends, however it ends: nothing stale is left.

    Args:
        job: this start of the run. One of a scheduler, or not the first of a launcher, waits for
            its predecessor; a person is told at once.
        patience_s: how long.
        warn: told what is waited for, and of a file system without locks.

    Raises:
        MegagridError: another run is writing there, or nothing can be written there.
        UnavailableError: another run still is, after the wait of one that starts again.
    """
    job = job or Job()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not emptied before it is locked: it names who has it.
        handle = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise MegagridError(
            f'logging.run_dir="{folder}" can\'t be written to ({error.strerror}); name another'
        ) from None
    is_again = job.id is not None or job.restarts > 0
    try:
        _wait(_Claim(folder, handle, warn), patience_s if is_again else 0.0, warn)
    except BaseException:
        handle.close()
        raise
    _sign(handle, job)
    return handle


class _Claim:
    """An attempt to have the folder.

    Args:
        warn: told if the file system has no locks.
    """

    def __init__(self, folder: Path, handle: TextIO, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._handle = handle
        self._warn = warn
        self._is_locked = False
        self._last: tuple[Beat, float] | None = None
        self._has_beaten = False

    def holder(self) -> str | None:
        """Who has the folder; None once it is ours."""
        if not self._is_locked:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _signature(self.folder / LOCK)
            except OSError as error:
                self._warn(
                    f'logging.run_dir="{self.folder}" is on a file system without locks '
                    f"({error.strerror}); whether another run writes there is told by its ranks' "
                    "beats alone: don't start two at the same moment"
                )
            self._is_locked = True
        beat = self._foreign_beat()
        if beat is None:
            return None
        return f"{_process(beat.pid, beat.job.id, beat.host)}, whose heart beats"

    @property
    def is_sure(self) -> bool:
        """Whether the holder lives: it has the lock, or has beaten while we looked."""
        return not self._is_locked or self._has_beaten

    def _foreign_beat(self) -> Beat | None:
        """The last beat of a run that may still be there, on a node that our lock may not reach.

        One that is old by our clock is of a run that is dead. Else the other's clock may be ahead
        of ours: then it is dead once it hasn't beaten for so long while we looked.
        """
        beat = read_beat(beat_file(self.folder, 0))
        if beat is None or beat.end is not None or beat.host == bootstrap.host_name():
            return None
        if beat.is_silent(time.time()):
            return None
        now = time.monotonic()
        if self._last is None or self._last[0].time != beat.time:
            self._has_beaten = self._last is not None
            self._last = beat, now
        if now - self._last[1] > STALE_BEATS * beat.interval_s:
            return None
        return beat


def _wait(claim: _Claim, patience_s: float, warn: Callable[[str], None]) -> None:
    """Until the folder is ours: at once, after its holder, or when that has turned out to be dead.

    Raises:
        MegagridError: it isn't in time.
    """
    start, is_told = time.monotonic(), False
    while (holder := claim.holder()) is not None:
        waited = time.monotonic() - start
        if claim.is_sure and waited >= patience_s:
            after = f" after {waited:.0f} s" if waited >= 1 else ""
            kind = UnavailableError if patience_s else MegagridError
            raise kind(
                f'logging.run_dir="{claim.folder}" belongs to a run that is still going on{after} '
                f"({holder}); wait for it, stop it, or name another folder"
            )
        if not is_told:
            warn(f"waiting for the run that has {claim.folder} to end: {holder}")
            is_told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _sign(handle: TextIO, job: Job) -> None:
    """Say in the lock who has it."""
    said = {
        "host": bootstrap.host_name(),
        "pid": os.getpid(),
        "job": job.id,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        handle.truncate(0)
        handle.write(json.dumps(said) + "\n")
        handle.flush()
    except OSError:
        pass  # a disk that is full holds a lock all the same


def _signature(path: Path) -> str:
    """Who has written its name into the lock, if that can be read."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"{_process(said['pid'], said['job'], said['host'])}, since {said['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "a process that hasn't left its name"


def _process(pid: int, job: str | None, host: str) -> str:
    return f"process {pid}{f' of job {job}' if job else ''} on {host}"
