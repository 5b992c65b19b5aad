"""How long a device works on a step's actions, by events among them: nobody waits for it.

A rank that waits for a message of the pipeline waits outside of its actions. Messages along tp, and
parameters that fully_shard gathers, are waited for inside: there a slow device shows in its whole
group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceClock:
    """Takes the time of a step's actions on the device that is current."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Time what the block gives the device to do."""
        start, end = (torch.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._spans.append((start, end))

    def read(self) -> float | None:
        """Seconds of all spans since the last call, once they are done, as they are when the step's
        numbers have been read; None: they aren't, or there were none."""
        spans, self._spans = self._spans, []
        if not spans or not all(end.query() for _, end in spans):
            return None
        return sum(start.elapsed_time(end) for start, end in spans) / 1000
