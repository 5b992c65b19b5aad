"""The schedules: for each a function that writes its compute order, and the table that names them.

Drawings are rank × time at T_F = T_I = T_W = 1, so that a whole backward B takes 2; communication
is free. Where ranks hold several stages a cell reads stage, kind, microbatch (`3F0`), otherwise
kind and microbatch (`F0`). `tests/pipeline/schedules/test_generators.py` holds the drawings true.

A microbatch that doesn't exist takes no time. Two generators rely on it: they write their pattern
for at least the microbatches that it needs and drop the surplus. Actions depend only on actions of
the same microbatch, and what is left of an order that can run can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from megagrid.pipeline.schedules.action import Action, Kind, ScheduleError
from megagrid.pipeline.schedules.schedule import Schedule, loop_placement, v_placement

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
Order = list[Action]


def gpipe(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Holds every microbatch; idle for (p-1)/(m+p-1) of the time.

        rank 0  F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
        rank 1  .  F0 F1 F2 .  .  .  B0--- B1--- B2--- .  .
        rank 2  .  .  F0 F1 F2 B0--- B1--- B2--- .  .  .  .
    """

    def order(rank: int) -> Order:
        forwards = [Action(rank, F, microbatch) for microbatch in range(num_microbatches)]
        return forwards + [Action(rank, B, microbatch) for microbatch in range(num_microbatches)]

    return Schedule(
        "GPipe",
        num_ranks,
        num_microbatches,
        loop_placement(num_ranks),
        (num_microbatches,) * num_ranks,
        _orders(order, num_ranks),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """One forward, one backward, once the pipeline is full (Narayanan et al., arXiv 2006.09503).

    The idle time of GPipe, (p-1)/(m+p-1), but rank r holds only p-r microbatches.

        rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
    """

    def order(rank: int) -> Order:
        warmup = num_ranks - rank - 1
        return _one_forward_one_backward(
            [Action(rank, F, microbatch) for microbatch in range(num_microbatches)],
            [Action(rank, B, microbatch) for microbatch in range(num_microbatches)],
            warmup,
        )

    return Schedule(
        "1F1B",
        num_ranks,
        num_microbatches,
        loop_placement(num_ranks),
        tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)),
        _orders(order, num_ranks),
    )


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages a rank (Narayanan et al., arXiv 2104.04473, section 2.2).

    Microbatches go in groups of p: a group passes chunk 0, then chunk 1, and so on; backwards
    likewise, last chunk first. The idle time of 1F1B shrinks by the factor `chunks`; rank r holds
    2(p-r-1) + (chunks-1)p + 1 activations, each of a stage that is `chunks` times smaller. Where
    p doesn't divide m, the last group is short.

        rank 0  0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
        rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   .
    """
    padded = -(-num_microbatches // num_ranks) * num_ranks
    group = num_ranks * chunks

    def sweep(rank: int, kind: Kind) -> Order:
        """All actions of one kind, in order."""
        actions = []
        for position in range(padded * chunks):
            chunk = position % group // num_ranks
            if kind is B:
                chunk = chunks - 1 - chunk
            microbatch = position // group * num_ranks + position % num_ranks
            actions.append(Action(chunk * num_ranks + rank, kind, microbatch))
        return actions

    def warmup(rank: int) -> int:
        return 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks

    def order(rank: int) -> Order:
        actions = _one_forward_one_backward(sweep(rank, F), sweep(rank, B), warmup(rank))
        return _existing(actions, num_microbatches)

    return Schedule(
        "Interleaved1F1B",
        num_ranks,
        num_microbatches,
        loop_placement(num_ranks, chunks),
        tuple(min(warmup(rank) + 1, num_microbatches * chunks) for rank in range(num_ranks)),
        _orders(order, num_ranks),
    )


def zb1p(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with its backward split in two: ZB-H1 (Qi et al., arXiv 2401.10241, 2.1).

    The input gradient goes upstream at once. Rank r puts off each weight gradient by r
    microbatches, which fills both the bubble while gradients come in and the one at the end, and
    lets every rank hold the p microbatches that 1F1B's first rank holds. What is left is
    (p-1)(T_F + T_I - T_W) of idle time, a third of 1F1B's where the three are equal.

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """

    def order(rank: int) -> Order:
        warmup = min(num_ranks - rank, num_microbatches)
        actions = [Action(rank, F, microbatch) for microbatch in range(warmup)]
        for microbatch in range(num_microbatches):
            actions.append(Action(rank, I, microbatch))
            if microbatch >= rank:
                actions.append(Action(rank, W, microbatch - rank))
            if microbatch + warmup < num_microbatches:
                actions.append(Action(rank, F, microbatch + warmup))
        late = range(max(num_microbatches - rank, 0), num_microbatches)
        return actions + [Action(rank, W, microbatch) for microbatch in late]

    return Schedule(
        "ZB1P",
        num_ranks,
        num_microbatches,
        loop_placement(num_ranks),
        (min(num_ranks, num_microbatches),) * num_ranks,
        _orders(order, num_ranks),
    )


def zbv(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Zero bubbles in 1F1B's memory: ZB-V (Qi et al., arXiv 2401.10241, section 6).

    Two stages a rank, placed as a V: rank r holds r and 2p-1-r, so that the last stage ends where
    the first begins and a microbatch's gradient comes back without crossing the pipeline first. No
    rank is idle between its first and its last action if T_F = T_I = T_W and m ≥ 2p-1. A rank
    holds 2p activations of stages half as large as 1F1B's, which is 1F1B's first rank's memory.

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    padded = max(num_microbatches, 2 * num_ranks - 1)

    def order(rank: int) -> Order:
        return _existing(_zbv_order(num_ranks, padded, rank), num_microbatches)

    return Schedule(
        "ZBV",
        num_ranks,
        num_microbatches,
        v_placement(num_ranks),
        (min(2 * num_ranks, 2 * num_microbatches),) * num_ranks,
        _orders(order, num_ranks),
    )


def _zbv_order(num_ranks: int, num_microbatches: int, rank: int) -> Order:
    """One rank's order of ZBV, for at least 2p-1 microbatches."""
    down, up = rank, 2 * num_ranks - 1 - rank
    following = {(stage, kind): 0 for stage in (down, up) for kind in (F, I, W)}
    order: Order = []

    def emit(*pattern: tuple[int, Kind], times: int = 1) -> None:
        """Append each (stage, kind) with the next microbatch that it hasn't seen."""
        for stage, kind in pattern * times:
            microbatch = following[stage, kind]
            if microbatch < num_microbatches:
                order.append(Action(stage, kind, microbatch))
            following[stage, kind] = microbatch + 1

    emit((down, F), times=2 * (num_ranks - rank) - 1)  # until the first one is back
    emit((up, F), (down, F), times=rank)
    emit((up, F), (up, I), (up, W), times=num_ranks - rank)
    while following[up, F] < num_microbatches:
        emit((down, F), (down, I), (down, W), (up, F), (up, I), (up, W))
    # The input gradients still missing come at every other tick; weight gradients fill the rest.
    emit((down, I), (up, I), times=rank)
    emit((down, I), (down, W), times=num_ranks - rank)
    emit((up, W), times=num_microbatches - following[up, W])
    emit((down, W), times=num_microbatches - following[down, W])
    return order


def forward_only(
    num_stages: int, num_microbatches: int, placement: Sequence[int] | None = None
) -> Schedule:
    """An evaluation: forwards alone, for any placement of the stages (None: a rank each).

    A rank that could run several stages runs the deepest, so that microbatches leave the
    pipeline as soon as they can and few inputs wait.

        rank 0  0F0 0F1 0F2 3F0 .   3F1 .   3F2
        rank 1  .   1F0 2F0 1F1 2F1 1F2 2F2 .

    Raises:
        ScheduleError: the placement isn't one rank per stage, or leaves a rank out.
    """
    placement = tuple(range(num_stages)) if placement is None else tuple(placement)
    if len(placement) != num_stages or not placement:
        raise ScheduleError(
            f"placement {placement} must name a rank for each of {num_stages} stages"
        )
    num_ranks = max(placement) + 1
    bare = Schedule(
        "ForwardOnly",
        num_ranks,
        num_microbatches,
        placement,
        (1,) * num_ranks,
        ((),) * num_ranks,
        forward_only=True,
    )
    deepest_first = [bare.stages_of_rank(rank)[::-1] for rank in range(num_ranks)]
    orders: list[Order] = [[] for _ in range(num_ranks)]
    done = [0] * num_stages  # microbatches that have passed each stage
    while done[-1] < num_microbatches:
        before = [num_microbatches, *done]  # before[s]: microbatches that have reached stage s
        for rank, stages in enumerate(deepest_first):
            ready = next((stage for stage in stages if before[stage + 1] < before[stage]), None)
            if ready is not None:
                orders[rank].append(Action(ready, F, done[ready]))
                done[ready] += 1
    return replace(bare, orders=tuple(map(tuple, orders)))


@dataclass(frozen=True)
class Generator:
    """A row of the table: how to write a schedule, and how many stages a rank may have.

    Attributes:
        build: (ranks, microbatches, stages a rank) -> schedule.
        min_chunks, max_chunks: stages a rank, inclusive; None for no upper limit.
    """

    build: Callable[[int, int, int], Schedule]
    min_chunks: int = 1
    max_chunks: int | None = 1


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "GPipe": Generator(gpipe),
        "1F1B": Generator(one_f_one_b),
        "Interleaved1F1B": Generator(interleaved_1f1b, min_chunks=2, max_chunks=None),
        "ZB1P": Generator(zb1p),
        "ZBV": Generator(zbv, min_chunks=2, max_chunks=2),
    }
)
"""Name, as in a recipe's `pipeline_schedule` -> how to write it."""


def stages_per_rank(name: str, virtual_stages: int = 1) -> int:
    """How many stages a rank has under a schedule, asked for `virtual_stages`.

    A schedule with a fixed number takes it where 1, the default, is asked for.

    Raises:
        ScheduleError: no such schedule, or it can't have that many.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"no schedule is called {name!r}; choose {', '.join(GENERATORS)}")
    least, most = GENERATORS[name].min_chunks, GENERATORS[name].max_chunks
    chunks = least if least == most and virtual_stages == 1 else virtual_stages
    if chunks < least or (most is not None and chunks > most):
        wanted = f"{least}" if least == most else f"{least} or more"
        others = [other for other, row in GENERATORS.items() if _fits(row, virtual_stages)]
        hint = f", or choose {' or '.join(others)}" if others else ""
        raise ScheduleError(
            f"{name} takes {wanted} as stages a rank, not {virtual_stages}; set that{hint}"
        )
    return chunks


def generate(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule called `name`.

    Args:
        name: a key of `GENERATORS`.
        num_ranks: ranks along the pipeline, 1 or more.
        num_microbatches: 1 or more; fewer than ranks, and no multiple of them, will do.
        virtual_stages: stages a rank.

    Raises:
        ScheduleError: no such schedule, or not with these numbers.
    """
    chunks = stages_per_rank(name, virtual_stages)
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{name} on {num_ranks} ranks with {num_microbatches} microbatches: both must be 1 or"
            " more"
        )
    return GENERATORS[name].build(num_ranks, num_microbatches, chunks)


def _fits(row: Generator, chunks: int) -> bool:
    return row.min_chunks <= chunks and (row.max_chunks is None or chunks <= row.max_chunks)


def _orders(order: Callable[[int], Order], num_ranks: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(order(rank)) for rank in range(num_ranks))


def _one_forward_one_backward(forwards: Order, backwards: Order, warmup: int) -> Order:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""

    def merged() -> Iterator[Action]:
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards[warmup:]) :]

    return list(merged())


def _existing(order: Order, num_microbatches: int) -> Order:
    return [action for action in order if action.microbatch < num_microbatches]
