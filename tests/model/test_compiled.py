"""What a compiled layer keeps for its backward, and computes in it, beside an uncompiled one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megagrid.grid.placement import Placement
from megagrid.model.compiled import compile_blocks, put_off_by_slots
from megagrid.model.decoder import Block
from megagrid.nn.context import Context
from megagrid.nn.offload import HostedForward, Lane
from megagrid.nn.split_backward import LateWeightGradients
from megagrid.train.build import build_whole_model
from tests.nn.test_recompute import Operations
from tests.plan.test_comm import run

S, B = 256, 2
CPU = torch.device("cpu")
RANDOM_STATE = 8192
"""Bytes, of which a CPU's generator takes 5056. Attention that is computed again might have dropped
something, for all a compiler knows."""


@dataclass(frozen=True)
class Built:
    """A layer, and what it is given.

    Attributes:
        shared: what all layers are given, and parameters.
    """

    layer: Block
    x: Tensor
    context: Context
    shared: list[Tensor]

    def forward(self) -> Tensor:
        return self.layer(self.x, self.context, None)


def build(backend: str | None, family: str, kind: str, *, in_documents: bool = False) -> Built:
    torch.manual_seed(1)
    config = run(Placement(), family, model__max_seq_length=S)
    stage = build_whole_model(config.model, torch.float32, CPU)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    stage.recompute(kind, 1)
    if backend is not None:
        torch._dynamo.reset()
        compile_blocks(stage, backend)
    places = torch.arange(S)
    rope = stage._rope(places.unsqueeze(1), torch.float32) if stage.rotated else None
    documents = (places // 10).repeat(B, 1) if in_documents else None
    given = [tensor for tensor in (places, rope, documents) if tensor is not None]
    x = torch.randn(S, B, config.model.hidden_size, requires_grad=True)
    context = Context(places, rope, documents)
    return Built(stage.layers["0"], x, context, [*given, *stage.parameters()])


def kept_and_computed(backend: str | None, *args, **kwargs) -> tuple[int, Counter[str]]:
    """Bytes that a layer keeps beside what is shared, and what its backward computes."""
    built = build(backend, *args, **kwargs)
    built.forward().sum().backward()  # compiles the backward, if that is yet to be done
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = built.forward()
    with Operations() as operations:
        y.sum().backward()
    shared = {tensor.untyped_storage()._cdata for tensor in built.shared}
    return sum(storages[address] for address in storages.keys() - shared), operations.calls


def compiled_beside_uncompiled(*args, **kwargs) -> tuple[int, Counter[str], int, Counter[str]]:
    compiled = kept_and_computed("aot_eager", *args, **kwargs)
    return *compiled, *kept_and_computed(None, *args, **kwargs)


@pytest.mark.parametrize(
    ("family", "kind", "in_documents"),
    [
        ("llama", "none", True),
        ("llama", "selective", False),
        ("gpt", "selective", True),
        ("llama", "full", False),
    ],
)
def test_a_compiled_layer_keeps_no_more_and_repeats_no_more(ranks, family, kind, in_documents):
    """No mask of documents, as large as a sample is long times itself; no product that a region
    ends in."""
    ((kept, computed, kept_uncompiled, computed_uncompiled),) = ranks.run(
        compiled_beside_uncompiled, family, kind, in_documents=in_documents, world_size=1
    )
    assert kept <= kept_uncompiled + (0 if kind == "none" else RANDOM_STATE)
    products = [calls["mm"] + calls["addmm"] for calls in (computed, computed_uncompiled)]
    assert products[0] == products[1] == (11 if kind == "full" else 8)


def kept_for_later(backend: str | None) -> tuple[int, list[Tensor]]:
    """Bytes of which weight gradients are made once backward is through, and the gradients."""
    built = build(backend, "llama", "none")
    late = LateWeightGradients()
    for product in built.layer.products:
        product.late = late
    if backend is not None:
        put_off_by_slots([built.layer], late)
    y = built.forward()
    y.backward(torch.ones_like(y))
    weights = [product.weight for product in built.layer.products]
    assert all(weight.grad is None for weight in weights)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in late.kept()}
    late.take().compute()
    return sum(storages.values()), [weight.grad for weight in weights]


def kept_for_later_either_way() -> list[tuple[int, list[Tensor]]]:
    return [kept_for_later(backend) for backend in ("aot_eager", None)]


def test_a_compiled_backward_puts_off_weight_gradients_and_keeps_no_more(ranks):
    (((compiled, found), (uncompiled, expected)),) = ranks.run(
        kept_for_later_either_way, world_size=1
    )
    assert compiled <= uncompiled
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def left_on_the_device(kind: str) -> tuple[int, int, int]:
    """Bytes that a compiled layer keeps, beside its input; those of them that go to the host; and
    how many storages of those are still referred to."""
    kept, _ = kept_and_computed("aot_eager", "llama", kind, in_documents=False)
    built = build("aot_eager", "llama", kind)
    forward = HostedForward(Lane(CPU), [built.x, *built.shared])
    with forward.layer(built.layer):
        built.forward()
    forward.end()
    moved = forward._last.storages.values()
    held = sum(not storage.original.expired() for storage in moved)
    return kept - built.x.nbytes, sum(storage.host.nbytes for storage in moved), held


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_what_a_compiled_layer_keeps_goes_to_the_host(ranks, kind):
    ((kept, moved, held),) = ranks.run(left_on_the_device, kind, world_size=1)
    assert kept - B * S * 4 * 2 <= moved <= kept  # but norms' scales, which are too small
    assert held == 0
