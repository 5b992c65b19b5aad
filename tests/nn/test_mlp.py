"""Feed-forward layers against their formulas, whole and split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.nn.init import Init
from megagrid.nn.mlp import GeluMLP, SwiGLU
from tests.nn import dense

S, B, H, FFN = 8, 2, 6, 16
INIT = Init(std=1.0)
CLASSES = {"swiglu": SwiGLU, "gelu": GeluMLP}


def weights(name: str, bias: bool) -> dense.Tensors:
    rows = {"gate": FFN, "up": FFN, "down": H} if name == "swiglu" else {"up": FFN, "down": H}
    tensors = {}
    for index, (matrix, n) in enumerate(rows.items()):
        columns = FFN if matrix == "down" else H
        tensors[f"{matrix}.weight"] = dense.random(index, n, columns) / math.sqrt(columns)
        if bias:
            tensors[f"{matrix}.bias"] = dense.random(10 + index, n)
    return tensors


def formula(name: str, x: Tensor, w: dense.Tensors) -> Tensor:
    def linear(matrix: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{matrix}.weight"], w.get(f"{matrix}.bias"))

    if name == "swiglu":
        gate = linear("gate", x)
        return linear("down", gate * torch.sigmoid(gate) * linear("up", x))
    up = linear("up", x)
    # GPT-2's gelu (Hendrycks & Gimpel 2016, the tanh form).
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return linear("down", 0.5 * up * (1 + torch.tanh(inner)))


def mlp_on_rank(name: str, sequence_parallel: bool, bias: bool):
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    layer = CLASSES[name](
        H,
        FFN,
        axis,
        bias=bias,
        init=INIT,
        out_init=INIT,
        sequence_parallel=sequence_parallel,
    )
    dense.fill(layer, weights(name, bias))
    x, grad = dense.random(50, S, B, H), dense.random(60, S, B, H)
    if sequence_parallel:
        x, grad = (t.chunk(axis.size)[axis.rank].clone() for t in (x, grad))
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, dense.gradients(layer)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize("name", CLASSES)
def test_mlp_equals_its_formula(ranks, name, size, sequence_parallel, bias):
    results = ranks.run(mlp_on_rank, name, sequence_parallel, bias, world_size=size)
    whole = {key: w.requires_grad_() for key, w in weights(name, bias).items()}
    x = dense.random(50, S, B, H).requires_grad_()
    y = formula(name, x, whole)
    y.backward(dense.random(60, S, B, H))
    for rank, (found, grad_x, _) in enumerate(results):
        expected, expected_grad = (
            (t.chunk(size)[rank] if sequence_parallel else t) for t in (y, x.grad)
        )
        dense.assert_equal(found, expected.detach(), "output")
        dense.assert_equal(grad_x, expected_grad, "gradient of the input")
    gradients = dense.whole_gradients([parts for *_, parts in results], whole)
    for key, gradient in gradients.items():
        dense.assert_equal(gradient, whole[key].grad, key)
