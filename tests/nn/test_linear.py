"""Column- and row-parallel layers compute what one dense layer computes, both ways."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.nn.init import Init
from megagrid.nn.linear import ColumnParallelLinear, Part, RowParallelLinear
from tests.nn import dense

S, B, IN, WIDE, OUT = 8, 3, 12, 16, 12
INIT = Init(std=1.0)


@dataclass(frozen=True)
class Result:
    """Of one rank: its output, its input's gradient, its parameters' gradients."""

    y: Tensor
    grad_x: Tensor
    gradients: list[dense.Part]


def share(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.chunk(axis.size, dim)[axis.rank].clone()


# ------------------------------------------------------------------------------------------------
# Column


def column_weights(kv_rows: int) -> dense.Tensors:
    rows = {"wq": WIDE, "wk": kv_rows, "wv": kv_rows}
    return {
        f"{name}.{kind}": dense.random(index, n, *([IN] if kind == "weight" else []))
        for index, (name, n) in enumerate(rows.items())
        for kind in ("weight", "bias")
    }


def column_on_rank(kv_rows: int, copies: int, sequence_parallel: bool, bias: bool) -> Result:
    torch.set_default_dtype(torch.float64)
    axis, kv = dense.axis_of_all(), dense.neighbours(copies)
    layer = ColumnParallelLinear(
        IN,
        [Part("wq", WIDE), Part("wk", kv_rows, kv), Part("wv", kv_rows, kv)],
        axis,
        bias=bias,
        init=INIT,
        sequence_parallel=sequence_parallel,
    )
    dense.fill(layer, column_weights(kv_rows))
    x = dense.random(50, S, B, IN)
    x = (share(x, axis, 0) if sequence_parallel else x).requires_grad_()
    y = layer(x)
    # Of each rank's outputs another gradient, as attention would give them.
    y.backward(dense.random(60 + axis.rank, *y.shape))
    return Result(y.detach(), x.grad, dense.gradients(layer))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(
    ("size", "kv_rows", "copies"), [(1, 4, 1), (2, 4, 1), (4, 8, 1), (4, 4, 2), (4, 4, 4)]
)
def test_column_parallel_equals_dense_matrices(
    ranks, size, kv_rows, copies, sequence_parallel, bias
):
    """Three matrices stacked; with fewer rows than ranks, neighbours have the same ones."""
    results = ranks.run(column_on_rank, kv_rows, copies, sequence_parallel, bias, world_size=size)
    leaves = {name: w.requires_grad_() for name, w in column_weights(kv_rows).items()}
    used = {name: w for name, w in leaves.items() if bias or name.endswith("weight")}
    x = dense.random(50, S, B, IN).requires_grad_()
    q, k, v = (
        F.linear(x, leaves[f"{name}.weight"], leaves[f"{name}.bias"] if bias else None)
        for name in ("wq", "wk", "wv")
    )
    kv_shares = size // copies
    outputs = [
        torch.cat(
            [
                q.chunk(size, -1)[rank],
                *(z.chunk(kv_shares, -1)[rank // copies] for z in (k, v)),
            ],
            dim=-1,
        )
        for rank in range(size)
    ]
    torch.autograd.backward(
        outputs, [dense.random(60 + rank, *y.shape) for rank, y in enumerate(outputs)]
    )
    for rank, result in enumerate(results):
        dense.assert_equal(result.y, outputs[rank].detach(), "output")
        grad_x = x.grad.chunk(size)[rank] if sequence_parallel else x.grad
        dense.assert_equal(result.grad_x, grad_x, "gradient of the input")
    found = dense.whole_gradients([result.gradients for result in results], used)
    for name, gradient in found.items():
        dense.assert_equal(gradient, used[name].grad, name)


# ------------------------------------------------------------------------------------------------
# Row


def row_weights() -> dense.Tensors:
    return {"wo.weight": dense.random(1, OUT, WIDE), "wo.bias": dense.random(2, OUT)}


def row_on_rank(sequence_parallel: bool, bias: bool) -> Result:
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    layer = RowParallelLinear(
        "wo", WIDE, OUT, axis, bias=bias, init=INIT, sequence_parallel=sequence_parallel
    )
    dense.fill(layer, row_weights())
    x = share(dense.random(50, S, B, WIDE), axis, -1).requires_grad_()
    y = layer(x)
    grad_y = dense.random(60, S, B, OUT)
    y.backward(share(grad_y, axis, 0) if sequence_parallel else grad_y)
    return Result(y.detach(), x.grad, dense.gradients(layer))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_equals_a_dense_matrix(ranks, size, sequence_parallel, bias):
    """The bias too, which is added once, not once a rank."""
    results = ranks.run(row_on_rank, sequence_parallel, bias, world_size=size)
    weights = {name: w.requires_grad_() for name, w in row_weights().items()}
    used = {name: w for name, w in weights.items() if bias or name.endswith("weight")}
    x = dense.random(50, S, B, WIDE).requires_grad_()
    y = F.linear(x, weights["wo.weight"], weights["wo.bias"] if bias else None)
    y.backward(dense.random(60, S, B, OUT))
    for rank, result in enumerate(results):
        expected = y.chunk(size)[rank] if sequence_parallel else y
        dense.assert_equal(result.y, expected.detach(), "output")
        dense.assert_equal(result.grad_x, x.grad.chunk(size, -1)[rank], "gradient of the input")
    found = dense.whole_gradients([result.gradients for result in results], used)
    for name, gradient in found.items():
        dense.assert_equal(gradient, used[name].grad, name)
