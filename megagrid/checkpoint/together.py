"""What ranks must agree on while they save and load: a failure of one is everyone's.

A rank that raised alone would leave the others waiting in their next collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megagrid.errors import CheckpointError, MegagridError
from megagrid.grid.grid import Axis

T = TypeVar("T")

ALONE = Axis.single("world")


def gather(value: T, world: Axis) -> list[T]:
    """`value` of every rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[T] = [value] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values


def on_first_rank(work: Callable[[], T], world: Axis) -> T:
    """Do `work` on the first rank alone; all return its result, or raise what it raised."""
    if world.size == 1:
        return work()
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if world.rank == 0:
        try:
            outcome = [(work(), None)]
        except Exception as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome, src=world.ranks[0], group=world.group)
    result, error = outcome[0]
    if error is not None:
        raise error
    return cast(T, result)


@contextmanager
def one_error(action: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint tells of failed ranks into one error.

    Raises:
        CheckpointError: disks or files failed.
        RuntimeError: anything else, with the ranks' tracebacks: a fault of the program.
    """
    try:
        with warnings.catch_warnings():
            # A run of one rank isn't told that it has no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        errors = {rank: failure.failures[rank][0] for rank in sorted(failure.failures)}
        if not all(isinstance(error, MegagridError | OSError) for error in errors.values()):
            raise RuntimeError(f"{action} failed: {failure}") from None
        # Several ranks often meet the same obstacle: say it once.
        told = dict.fromkeys(_one_line(action, rank, error) for rank, error in errors.items())
        raise CheckpointError("; ".join(told)) from None


def _one_line(action: str, rank: int, error: BaseException) -> str:
    """An error of megagrid says all; the system's doesn't say what it hindered, nor where."""
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename else ""
        return f"{action} failed on rank {rank}: {where}{what}"
    return str(error)
