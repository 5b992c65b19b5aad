"""What a compiled layer keeps for its backward, and computes in it, beside an uncompiled one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megagrid.grid.placement import Placement
from megagrid.model.compiled import compile_blocks
from megagrid.nn.context import Context
from megagrid.train.build import build_whole_model
from tests.nn.test_recompute import Operations
from tests.plan.test_comm import run

S, B = 256, 2
CPU = torch.device("cpu")
RANDOM_STATE = 8192
"""Bytes, of which a CPU's generator takes 5056. Attention that is computed again might have dropped
something, for all a compiler knows."""


def kept_and_computed(
    backend: str | None, family: str, kind: str, *, in_documents: bool
) -> tuple[int, Counter[str]]:
    """Bytes that a layer keeps beside its parameters and what all layers are given, and what its
    backward computes."""
    config = run(Placement(), family, model__max_seq_length=S)
    stage = build_whole_model(config.model, torch.float32, CPU)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    stage.recompute(kind, 1)
    if backend is not None:
        compile_blocks(stage, backend)
    places = torch.arange(S)
    rope = stage._rope(places.unsqueeze(1), torch.float32) if stage.rotated else None
    documents = (places // 10).repeat(B, 1) if in_documents else None
    given = [tensor for tensor in (places, rope, documents) if tensor is not None]
    known = {tensor.untyped_storage()._cdata for tensor in (*stage.parameters(), *given)}
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    x = torch.randn(S, B, config.model.hidden_size, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage.layers["0"](x, Context(places, rope, documents), None)
    y.sum().backward()  # compiles the backward, if that is yet to be done
    storages.clear()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage.layers["0"](x, Context(places, rope, documents), None)
    with Operations() as operations:
        y.sum().backward()
    return sum(storages[address] for address in storages.keys() - known), operations.calls


def compiled_beside_uncompiled(*args, **kwargs) -> tuple[int, Counter[str], int, Counter[str]]:
    torch._dynamo.reset()
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
