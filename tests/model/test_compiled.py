"""What a compiled layer keeps for its backward: the compiler's choice, within bounds."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from megagrid.grid.placement import Placement
from megagrid.model.compiled import compile_blocks
from megagrid.nn.context import Context
from megagrid.train.build import build_whole_model
from tests.plan.test_comm import run

S, B = 256, 2
CPU = torch.device("cpu")


def kept(backend: str | None, *, in_documents: bool) -> int:
    """Bytes that a Llama's layer keeps, gradients of its own apart."""
    stage = build_whole_model(run(Placement()).model, torch.float32, CPU)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if backend is not None:
        compile_blocks(stage, backend)
    places = torch.arange(S)
    rope = stage._rope(places.unsqueeze(1), torch.float32)
    documents = (places // 10).repeat(B, 1) if in_documents else None
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return tensor

    x = torch.randn(S, B, stage.model.hidden_size, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage.layers["0"](x, Context(places, rope, documents), None)
    del y
    return sum(storages.values())


def kept_either_way() -> list[int]:
    return [kept(backend, in_documents=True) for backend in ("aot_eager", None)]


def test_no_mask_of_documents_is_kept(ranks):
    """It is as large as a sample is long times itself, and backward makes it again."""
    ((compiled, uncompiled),) = ranks.run(kept_either_way, world_size=1)
    assert compiled <= uncompiled < compiled + B * S * S * 4
