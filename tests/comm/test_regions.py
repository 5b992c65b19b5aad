"""Each row of the regions' table against dense tensors: forward, and backward as its conjugate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megagrid.comm import regions
from megagrid.grid.grid import Axis

S, B, H = 8, 3, 5
"""Of a whole tensor."""


def axis_of_all() -> Axis:
    ranks = tuple(range(dist.get_world_size()))
    return Axis("tp", ranks, dist.get_rank(), dist.group.WORLD if len(ranks) > 1 else None)


def whole(seed: int) -> Tensor:
    """(s, b, h), the same on every rank."""
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int) -> Tensor:
    """(s, b, h), another on each rank."""
    return whole(100 + rank)


@dataclass(frozen=True)
class Row:
    """A row of the table, in dense terms.

    Attributes:
        region: the function, called with the input and the axis.
        x, y: input and output on a rank, from (rank, size).
        grad_y, grad_x: the output's gradient that a rank is given, and the input's that is right.
    """

    region: Callable[[Tensor, Axis], Tensor]
    x: Callable[[int, int], Tensor]
    y: Callable[[int, int], Tensor]
    grad_y: Callable[[int, int], Tensor]
    grad_x: Callable[[int, int], Tensor]


def total(_: int, size: int) -> Tensor:
    return sum(of_rank(rank) for rank in range(size))


def shard_of(tensor: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    return lambda rank, size: tensor(rank, size).chunk(size)[rank]


def same(rank: int, size: int) -> Tensor:
    return whole(0)


def different(rank: int, size: int) -> Tensor:
    return of_rank(rank)


def tokens_of(tensor: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    """A cp rank's chunks of the sample: the first of 2 size from the front, the other from the
    back."""

    def of_rank(rank: int, size: int) -> Tensor:
        chunks = tensor(rank, size).chunk(2 * size)
        return tensor(rank, size) if size == 1 else torch.cat([chunks[rank], chunks[-1 - rank]])

    return of_rank


def in_heads(rank: int, size: int) -> Tensor:
    """(s, b, heads, d), the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(S, B, 8, 5, dtype=torch.float64, generator=generator)


def heads_of(tensor: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    return lambda rank, size: tensor(rank, size).chunk(size, dim=2)[rank].clone()


ROWS = {
    "enter": Row(
        region=lambda x, axis: regions.enter(x, axis),
        x=same,
        y=same,
        grad_y=different,
        grad_x=total,
    ),
    "leave": Row(
        region=lambda x, axis: regions.leave(x, axis),
        x=different,
        y=total,
        grad_y=same,
        grad_x=same,
    ),
    "enter_sequence": Row(
        region=lambda x, axis: regions.enter(x, axis, sequence_parallel=True),
        x=shard_of(same),
        y=same,
        grad_y=different,
        grad_x=shard_of(total),
    ),
    "leave_sequence": Row(
        region=lambda x, axis: regions.leave(x, axis, sequence_parallel=True),
        x=different,
        y=shard_of(total),
        grad_y=shard_of(same),
        grad_x=same,
    ),
    "gather_sample": Row(
        region=lambda x, axis: regions.gather_sample(x, axis),
        x=tokens_of(same),
        y=same,
        grad_y=different,
        grad_x=tokens_of(total),
    ),
    "to_heads": Row(
        region=lambda x, axis: regions.to_heads(x, axis),
        x=tokens_of(in_heads),
        y=heads_of(in_heads),
        grad_y=heads_of(in_heads),
        grad_x=tokens_of(in_heads),
    ),
    "to_tokens": Row(
        region=lambda x, axis: regions.to_tokens(x, axis),
        x=heads_of(in_heads),
        y=tokens_of(in_heads),
        grad_y=tokens_of(in_heads),
        grad_x=heads_of(in_heads),
    ),
}


def deviation_on_rank(name: str) -> tuple[float, float]:
    """Of the output and of the input's gradient from the dense ones."""
    row, axis = ROWS[name], axis_of_all()
    at = axis.rank, axis.size
    x = row.x(*at).requires_grad_()
    # Not the leaf itself: a region may take the memory of its input.
    y = row.region(x * 1.0, axis)
    forward = (y - row.y(*at)).abs().max().item()
    y.backward(row.grad_y(*at))
    return forward, (x.grad - row.grad_x(*at)).abs().max().item()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_region_equals_its_row_of_the_table(ranks, name, size):
    for forward, backward in ranks.run(deviation_on_rank, name, world_size=size):
        assert forward < 1e-14
        assert backward < 1e-14


def test_table_of_the_docstring_has_these_rows():
    lines = [line.split("|")[0].strip() for line in regions.__doc__.splitlines() if "|" in line]
    assert lines[2:] == list(ROWS)


def conjugate_on_rank() -> list[tuple[float, float]]:
    """<R x, g> and <x, R* g>, added up over the ranks' tensors, for each row."""
    axis, products = axis_of_all(), []
    for name, row in ROWS.items():
        x = row.x(axis.rank, axis.size).requires_grad_()
        y = row.region(x * 1.0, axis)
        y.backward(row.grad_y(axis.rank, axis.size))
        pair = torch.stack([(y * row.grad_y(axis.rank, axis.size)).sum(), (x * x.grad).sum()])
        pair = pair.detach()
        # What is the same on every rank is one tensor.
        for index, is_same in enumerate([name == "leave", name == "enter"]):
            pair[index] /= axis.size if is_same else 1
        dist.all_reduce(pair)
        products.append(tuple(pair.tolist()))
    return products


@pytest.mark.parametrize("size", [2, 4])
def test_backward_is_the_adjoint_of_forward(ranks, size):
    """The definition of a gradient, without naming any collective."""
    for products in ranks.run(conjugate_on_rank, world_size=size):
        for there, back in products:
            assert there == pytest.approx(back, rel=1e-12)


def non_contiguous_on_rank() -> bool:
    axis = axis_of_all()
    for name in ("enter", "enter_sequence", "leave_sequence"):
        row = ROWS[name]
        x = row.x(axis.rank, axis.size)
        turned = x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        y = row.region(turned * 1.0, axis)
        grad = row.grad_y(axis.rank, axis.size)
        y.backward(grad.transpose(0, 2).contiguous().transpose(0, 2))
        right = row.y(axis.rank, axis.size), row.grad_x(axis.rank, axis.size)
        if not (torch.allclose(y, right[0]) and torch.allclose(turned.grad, right[1])):
            return False
    return True


def test_regions_take_strided_tensors(ranks):
    assert ranks.run(non_contiguous_on_rank, world_size=2) == [True, True]
