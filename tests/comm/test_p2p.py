"""Messages arrive at the right rank, in order, whole, and without deadlock."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from megagrid.comm.p2p import Message, Pending, post
from megagrid.grid.grid import Axis


def axis_of(ranks: tuple[int, ...]) -> Axis:
    """An axis of some of the world's ranks. Collective over the world."""
    group = dist.new_group(list(ranks))
    rank = dist.get_rank()
    return Axis("pp", ranks, ranks.index(rank) if rank in ranks else -1, group)


def send(values: list[float], peer: int) -> Message:
    return Message(torch.tensor(values), peer, is_send=True)


def receive(count: int, peer: int) -> Message:
    return Message(torch.empty(count), peer, is_send=False)


def wait_all(pending: list[Pending]) -> list[list[float]]:
    return [item.wait().tolist() for item in pending]


# ------------------------------------------------------------------------------------------------


def both_send_first(count: int) -> float:
    axis = axis_of((0, 1))
    other = 1 - axis.rank
    mine = torch.full((count,), float(axis.rank))
    sent, received = post(
        [
            Message(mine, other, is_send=True),
            Message(torch.empty(count), other, is_send=False),
        ],
        axis,
    )
    sent.wait()
    return received.wait().mean().item()


@pytest.mark.parametrize("count", [4, 1 << 20])
def test_two_ranks_that_both_send_first_exchange(ranks, count):
    assert ranks.run(both_send_first, count, world_size=2) == [1.0, 0.0]


def ring() -> list[float]:
    axis = axis_of(tuple(range(dist.get_world_size())))
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    return wait_all(post([send([float(axis.rank)], after), receive(1, before)], axis))[1]


def test_all_ranks_of_a_ring_exchange_at_once(ranks):
    assert ranks.run(ring, world_size=4) == [[3.0], [0.0], [1.0], [2.0]]


def in_order() -> list[list[float]]:
    """Several messages of one pair: in one batch, and in batches before any is waited for."""
    axis = axis_of((0, 1))
    pending = []
    for batch in range(3):
        values = [[float(10 * batch + i)] for i in range(3)]
        messages = [send(v, 1) if axis.rank == 0 else receive(1, 0) for v in values]
        pending += post(messages, axis)
    return wait_all(pending)


def test_messages_of_a_pair_arrive_in_the_order_of_posting(ranks):
    expected = [[float(10 * batch + i)] for batch in range(3) for i in range(3)]
    assert ranks.run(in_order, world_size=2)[1] == expected


def on_part_of_the_world() -> list[float]:
    axis = axis_of((3, 1))
    if axis.rank < 0:
        return []
    other = 1 - axis.rank
    return wait_all(post([send([10.0 + axis.rank], other), receive(1, other)], axis))[1]


def test_peers_are_indices_along_the_axis_not_global_ranks(ranks):
    # Rank 3 is the axis's 0, rank 1 its 1.
    assert ranks.run(on_part_of_the_world, world_size=4) == [[], [10.0], [], [11.0]]


def received_late() -> list[float]:
    """The sender's tensor is held by nothing but its handle until it has been sent."""
    axis = axis_of((0, 1))
    if axis.rank == 0:
        (sent,) = post([send([1.0, 2.0, 3.0], 1)], axis)
        gc.collect()
        dist.barrier()
        sent.wait()
        return []
    dist.barrier()
    (received,) = post([receive(3, 0)], axis)
    return received.wait().tolist()


def test_message_waits_for_its_receiver(ranks):
    assert ranks.run(received_late, world_size=2)[1] == [1.0, 2.0, 3.0]


def dtypes() -> list[torch.dtype]:
    axis = axis_of((0, 1))
    got = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        x = torch.arange(6).to(dtype).view(2, 3)
        message = Message(
            x if axis.rank == 0 else torch.empty_like(x), 1 - axis.rank, axis.rank == 0
        )
        (pending,) = post([message], axis)
        arrived = pending.wait()
        assert torch.equal(arrived, x)
        got.append(arrived.dtype)
    return got


def test_any_dtype_travels_bit_by_bit(ranks):
    assert ranks.run(dtypes, world_size=2)[1] == [torch.float64, torch.bfloat16, torch.int64]
