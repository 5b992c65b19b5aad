"""Signals that ask a run to save and stop: SIGTERM and SIGUSR1, to any one rank or to all.

    SIGTERM to rank 2     notes it, and goes on with its step
    end of the step       every rank hears of it, in the message that adds up losses and norms
    every rank            saves this step, waits for the save, ends with exit_codes.STOPPED

Schedulers send SIGTERM before they kill, and SIGUSR1 where one asks for an early warning.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop. Once is enough: asked again, it remains so."""

    def __init__(self) -> None:
        self.is_made = False

    def make(self) -> None:
        self.is_made = True

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Take `SIGNALS` for the request while the block runs; before and after, they kill.

        Nothing is lost by that before there are steps, and a rank that still waits for the others
        to come up must not keep the launcher waiting when one of them won't.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self.make()

        former = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
