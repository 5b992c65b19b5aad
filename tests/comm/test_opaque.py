"""Operators that compilers don't look into are what compilers are told of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megagrid.comm.opaque import OPS
from megagrid.nn import blockwise, ring  # noqa: F401, whose operators these are
from tests.nn import dense

B, HEADS, KV_HEADS, S, D = 2, 4, 2, 8, 16


def attention_tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries and keys as attention has them, (b, heads, s, d) by strides, and documents."""
    q = dense.random(1, S, B, HEADS, D).to(dtype).permute(1, 2, 0, 3)
    k = dense.random(2, S, B, KV_HEADS, D).to(dtype).permute(1, 2, 0, 3)
    return q, k, dense.random(3, S, B, KV_HEADS, D).to(dtype).permute(1, 2, 0, 3)


def check(name: str, *args) -> tuple[torch.Tensor, ...]:
    """That results of tensors without values have the shapes, dtypes and strides of real ones."""
    operator = getattr(getattr(torch.ops, OPS), name).default
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
    return operator(*args)


def check_blockwise(dtype: torch.dtype, *, in_documents: bool) -> None:
    q, k, v = attention_tensors(dtype)
    documents = (torch.arange(S) // 3).repeat(B, 1) if in_documents else None
    spans = [0, S // 4, S // 2, S], [0, S]
    q = q[:, :, : S // 4 + S // 2]
    out, lse = check("blockwise_forward", q, k, v, *spans, documents)
    grads = check("blockwise_backward", out, q, k, v, out, lse, *spans, documents)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def check_ring(dtype: torch.dtype, *, in_documents: bool) -> None:
    group = dist.group.WORLD.group_name
    q, k, v = attention_tensors(dtype)
    kv = torch.stack([k, v]).contiguous()
    documents = (torch.arange(2 * S) // 3).repeat(B, 1) if in_documents else None
    out, lse = check("ring_forward", q, kv, documents, group)
    grads = check("ring_backward", out, q, kv, out, lse, documents, group)
    assert [grad.shape for grad in grads] == [q.shape, kv.shape]


@pytest.mark.parametrize("in_documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("checked", "world"), [(check_blockwise, 1), (check_ring, 2)])
def test_an_operator_returns_what_it_says_it_will(ranks, checked, world, dtype, in_documents):
    ranks.run(checked, dtype, in_documents=in_documents, world_size=world)
