"""Cross-entropy over split logits against torch's over whole ones, value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.comm.ledger import Ledger
from megagrid.grid.grid import Axis
from megagrid.nn.loss import IGNORE, vocab_parallel_cross_entropy
from tests.nn import dense

N, VOCAB = 24, 61


def labels_of(kind: str) -> Tensor:
    labels = torch.arange(N) * 17 % VOCAB
    if kind == "some ignored":
        labels[::3] = IGNORE
    if kind == "all ignored":
        labels[:] = IGNORE
    if kind == "first and last id":
        labels[::2], labels[1::2] = 0, VOCAB - 1
    return labels


def logits_of(scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return (dense.random(1, N, VOCAB) * scale).to(dtype)


def cross_entropy_on_rank(
    kind: str, padded: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    axis = dense.axis_of_all()
    # What padding's columns hold is nobody's concern: here it would win every softmax.
    whole = torch.full((N, padded), 1e4, dtype=dtype)
    whole[:, :VOCAB] = logits_of(scale, dtype)
    logits = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits * 1.0, labels_of(kind), VOCAB, axis)
    (loss * 0.125).backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["", "large logits"])
@pytest.mark.parametrize("kind", ["all valid", "some ignored", "all ignored", "first and last id"])
@pytest.mark.parametrize(
    ("size", "padded"), [(1, 61), (1, 64), (2, 62), (2, 64), (4, 64), (2, 256), (4, 512)]
)
def test_loss_and_gradient_equal_torchs(ranks, size, padded, kind, scale):
    """Also where a rank's share is all padding, or no label is in it."""
    results = ranks.run(cross_entropy_on_rank, kind, padded, scale, torch.float64, world_size=size)
    logits = logits_of(scale).requires_grad_()
    expected = F.cross_entropy(logits, labels_of(kind), ignore_index=IGNORE, reduction="sum")
    (expected * 0.125).backward()
    for loss, _ in results:
        dense.assert_equal(loss, expected.detach(), "loss")
    gradient = torch.cat([gradient for _, gradient in results], dim=1)
    dense.assert_equal(gradient[:, :VOCAB], logits.grad, "gradient")
    assert not gradient[:, VOCAB:].any(), "padding has a gradient"


@pytest.mark.parametrize("size", [1, 2])
def test_float32_loses_no_more_than_roundings(ranks, size):
    results = ranks.run(
        cross_entropy_on_rank, "some ignored", 64, 3.0, torch.float32, world_size=size
    )
    logits = logits_of(3.0, torch.float32).double().requires_grad_()
    expected = F.cross_entropy(
        logits, labels_of("some ignored"), ignore_index=IGNORE, reduction="sum"
    )
    (expected * 0.125).backward()
    u = torch.finfo(torch.float32).eps / 2
    gradient = torch.cat([gradient for _, gradient in results], dim=1)[:, :VOCAB]
    # A term is off by the roundings of exp, of the sum of 61 exponentials and of its logarithm.
    assert (gradient - logits.grad).abs().max() <= VOCAB * u * 0.125
    for loss, _ in results:
        assert abs(loss - expected) <= N * VOCAB * u * 10


def test_second_backward_is_refused():
    """The first has turned the logits' memory into the gradient."""
    logits = logits_of(1.0).requires_grad_()
    loss = vocab_parallel_cross_entropy(
        logits * 1.0, labels_of("all valid"), VOCAB, Axis.single("tp")
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def communication_on_rank() -> dict:
    axis = dense.axis_of_all()
    logits = dense.random(1, N, 32).requires_grad_()
    with Ledger([axis]) as ledger:
        vocab_parallel_cross_entropy(logits * 1.0, labels_of("all valid"), VOCAB, axis).backward()
    return ledger.totals()


def test_three_numbers_a_token_are_all_that_is_communicated(ranks):
    """Logits, 32 numbers a token here, never are."""
    for totals in ranks.run(communication_on_rank, world_size=2):
        assert totals == {("tp", "all_reduce"): (2, 3 * N * 8)}
