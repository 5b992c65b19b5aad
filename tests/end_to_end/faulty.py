"""`megagrid …`, but as one of its ranks it has a fault: `python -m tests.end_to_end.faulty …`.

FAULT names the fault and FAULTY_RANK the rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megagrid.cli import main

AT_STEP = 3


def before(module: Any, name: str, fault: Callable[..., None]) -> None:
    """Have `fault` called, with the arguments of each call, before a function of a module."""
    function = getattr(module, name)

    def with_fault(*arguments: Any, **keys: Any) -> Any:
        fault(*arguments, **keys)
        return function(*arguments, **keys)

    setattr(module, name, with_fault)


def spin() -> None:
    """Never end."""
    while True:
        time.sleep(0.01)


def read_without_end() -> None:
    """A file that gives nothing, as one of a network's may."""
    incoming, _ = os.pipe()
    os.read(incoming, 1)


def hang_in_compute() -> None:
    from megagrid.train import attempt

    before(attempt, "apply_gradients", lambda engine, *_, **__: _from_step(spin))


def hang_in_read() -> None:
    from megagrid.data.batches import Loader

    def step(loader: Loader, consumed: int) -> None:
        if consumed >= AT_STEP * loader.sampler.global_batch_size:
            read_without_end()

    before(Loader, "step", step)


def slow_index() -> None:
    from megagrid.train import run

    before(run, "_open_data", lambda config: time.sleep(3 * config.train.timeout_seconds))


def slow_host() -> None:
    from megagrid.train import attempt

    before(attempt, "apply_gradients", lambda *_, **__: time.sleep(0.4))


_calls: list[None] = []


def _from_step(fault: Callable[[], None]) -> None:
    _calls.append(None)
    if len(_calls) >= AT_STEP:
        fault()


FAULTS = {
    "hang in compute": hang_in_compute,
    "hang in read": hang_in_read,
    "slow index": slow_index,
    "slow host": slow_host,
}

if __name__ == "__main__":
    if os.environ.get("RANK") == os.environ["FAULTY_RANK"]:
        FAULTS[os.environ["FAULT"]]()
    sys.exit(main())
