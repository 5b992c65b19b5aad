"""Norms against their formulas; their gradients under sequence parallelism are summands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megagrid.nn.norm import LayerNorm, RMSNorm
from tests.nn import dense

S, B, H, EPS = 8, 2, 6, 1e-3
CLASSES = {"rms": RMSNorm, "layer": LayerNorm}


def weights(name: str) -> dense.Tensors:
    kinds = ("weight",) if name == "rms" else ("weight", "bias")
    return {f"norm.{kind}": dense.random(index, H) for index, kind in enumerate(kinds)}


def formula(name: str, x: Tensor, w: dense.Tensors) -> Tensor:
    if name == "rms":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * w["norm.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPS)
    return centred / scale * w["norm.weight"] + w["norm.bias"]


def norm_on_rank(name: str, sequence_parallel: bool):
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    layer = CLASSES[name]("norm", H, axis, eps=EPS, sequence_parallel=sequence_parallel)
    dense.fill(layer, weights(name))
    x, grad = dense.random(50, S, B, H), dense.random(60, S, B, H)
    if sequence_parallel:
        x, grad = (t.chunk(axis.size)[axis.rank].clone() for t in (x, grad))
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, dense.gradients(layer)


@pytest.mark.parametrize(
    ("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize("name", CLASSES)
def test_norm_equals_its_formula(ranks, name, size, sequence_parallel):
    results = ranks.run(norm_on_rank, name, sequence_parallel, world_size=size)
    whole = {key: w.requires_grad_() for key, w in weights(name).items()}
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
