"""Attention against its definition, head by head: MHA, GQA and MQA, whole and split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.nn.attention import Attention
from megagrid.nn.context import Context
from megagrid.nn.dropout import DropoutStreams, attention_dropout
from megagrid.nn.init import Init
from megagrid.nn.rope import rotate, rotation
from tests.nn import dense

S, B, H, HEADS, D = 8, 2, 12, 8, 4
INIT = Init(std=1.0)


@dataclass(frozen=True)
class Setting:
    """What an attention layer is told."""

    kv_heads: int = 2
    bias: bool = False
    rotated: bool = True
    dropout: float = 0.0
    qkv_bias: bool = False
    qk_norm_eps: float | None = None

    @property
    def dropout_keys(self) -> Tensor | None:
        return DropoutStreams(1, 2, torch.arange(B)).of("place") if self.dropout else None

    @property
    def rope(self) -> Tensor | None:
        if not self.rotated:
            return None
        return rotation(torch.arange(S).unsqueeze(1), D, 100.0, torch.float64)


def weights(setting: Setting) -> dense.Tensors:
    rows = {"wq": HEADS * D, "wk": setting.kv_heads * D, "wv": setting.kv_heads * D, "wo": H}
    tensors = {}
    for index, (name, n) in enumerate(rows.items()):
        columns = HEADS * D if name == "wo" else H
        tensors[f"{name}.weight"] = dense.random(index, n, columns) / math.sqrt(columns)
        if setting.bias or (setting.qkv_bias and name != "wo"):
            tensors[f"{name}.bias"] = dense.random(10 + index, n)
    if setting.qk_norm_eps is not None:
        tensors["q_norm.weight"], tensors["k_norm.weight"] = dense.random(20, 2, D)
    return tensors


def definition(setting: Setting, x: Tensor, w: dense.Tensors) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, one head, sample and query at a time."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    q, k, v = (linear(name, x).view(S, B, -1, D) for name in ("wq", "wk", "wv"))
    if (eps := setting.qk_norm_eps) is not None:
        q, k = (
            t / torch.sqrt((t * t).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]
            for t, name in ((q, "q_norm"), (k, "k_norm"))
        )
    if setting.rotated:
        q, k = rotate(q, setting.rope), rotate(k, setting.rope)
    kept = torch.ones(B, HEADS, S, S, dtype=torch.float64)
    if setting.dropout:
        kept = attention_dropout(
            kept, setting.dropout, setting.dropout_keys, first_head=0, queries=torch.arange(S)
        )
    shared = HEADS // setting.kv_heads
    rows = []
    for query in range(S):
        for sample in range(B):
            for head in range(HEADS):
                keys, values = (t[: query + 1, sample, head // shared] for t in (k, v))
                scores = keys @ q[query, sample, head] / math.sqrt(D)
                probabilities = scores.softmax(0) * kept[sample, head, query, : query + 1]
                rows.append(probabilities @ values)
    return linear("wo", torch.stack(rows).view(S, B, HEADS * D))


def attention_on_rank(setting: Setting, sequence_parallel: bool):
    torch.set_default_dtype(torch.float64)
    axis = dense.axis_of_all()
    kv_axis = dense.neighbours(max(1, axis.size // setting.kv_heads))
    layer = Attention(
        H,
        HEADS,
        setting.kv_heads,
        D,
        axis,
        kv_axis,
        Axis.single("cp"),
        exchange="all_gather",
        bias=setting.bias,
        dropout=setting.dropout,
        qkv_bias=setting.qkv_bias,
        qk_norm_eps=setting.qk_norm_eps,
        init=INIT,
        out_init=INIT,
        sequence_parallel=sequence_parallel,
    )
    dense.fill(layer, weights(setting))
    x, grad = dense.random(50, S, B, H), dense.random(60, S, B, H)
    if sequence_parallel:
        x, grad = (t.chunk(axis.size)[axis.rank].clone() for t in (x, grad))
    x.requires_grad_()
    y = layer(x, Context(torch.arange(S), setting.rope), setting.dropout_keys)
    y.backward(grad)
    return y.detach(), x.grad, dense.gradients(layer)


SETTINGS = {
    "mha": Setting(kv_heads=8),
    "gqa": Setting(kv_heads=2),
    "mqa": Setting(kv_heads=1),
    "gqa unrotated with biases": Setting(kv_heads=4, rotated=False, bias=True),
    "mqa with biases": Setting(kv_heads=1, bias=True),
    "gqa with dropout": Setting(kv_heads=2, dropout=0.3),
    "gqa with biases on the way in": Setting(kv_heads=2, qkv_bias=True),
    "gqa with norms": Setting(kv_heads=2, qk_norm_eps=1e-3),
    "mqa with norms and biases": Setting(kv_heads=1, qkv_bias=True, qk_norm_eps=0.1),
}


@pytest.mark.parametrize(
    ("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_attention_equals_its_definition(ranks, name, size, sequence_parallel):
    setting = SETTINGS[name]
    results = ranks.run(attention_on_rank, setting, sequence_parallel, world_size=size)
    whole = {key: w.requires_grad_() for key, w in weights(setting).items()}
    x = dense.random(50, S, B, H).requires_grad_()
    y = definition(setting, x, whole)
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


def test_no_token_sees_a_later_one():
    """Directly: a change at position 5 leaves outputs 0 to 4 bit-equal."""
    layer = Attention(
        H,
        HEADS,
        2,
        D,
        Axis.single("tp"),
        Axis.single("kv"),
        Axis.single("cp"),
        exchange="all_gather",
        bias=False,
        dropout=0.0,
        init=INIT,
        out_init=INIT,
        sequence_parallel=False,
    ).double()
    dense.fill(layer, weights(Setting()))
    x = dense.random(1, S, B, H)
    changed = x.clone()
    changed[5] += 1.0
    context = Context(torch.arange(S), Setting().rope)
    before, after = layer(x, context, None), layer(changed, context, None)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])
