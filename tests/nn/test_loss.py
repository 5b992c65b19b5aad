"""Cross-entropy over split logits against torch's over whole ones, value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from megagrid.comm.ledger import Ledger
from megagrid.grid.grid import Axis
from megagrid.nn.loss import IGNORE, chunked_losses, token_losses, vocab_parallel_cross_entropy
from tests.kept import Kept
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
    kind: str, padded: int, scale: float, dtype: torch.dtype, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    axis = dense.axis_of_all()
    # What padding's columns hold is nobody's concern: here it would win every softmax.
    whole = torch.full((N, padded), 1e4, dtype=dtype)
    whole[:, :VOCAB] = logits_of(scale, dtype)
    logits = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits * 1.0, labels_of(kind), VOCAB, axis, z_loss)
    (losses * 0.125).sum().backward()
    return losses.detach(), logits.grad


def torchs_losses(logits: Tensor, kind: str, z_loss: float) -> Tensor:
    """By torch's own operators on whole logits."""
    labels = labels_of(kind)
    entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    log_z = logits.logsumexp(dim=1)[labels != IGNORE]
    return torch.stack([entropy, z_loss * log_z.square().sum()])


@pytest.mark.parametrize("z_loss", [0.0, 0.01], ids=["", "z-loss"])
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["", "large logits"])
@pytest.mark.parametrize("kind", ["all valid", "some ignored", "all ignored", "first and last id"])
@pytest.mark.parametrize(
    ("size", "padded"), [(1, 61), (1, 64), (2, 62), (2, 64), (4, 64), (2, 256), (4, 512)]
)
def test_loss_and_gradient_equal_torchs(ranks, size, padded, kind, scale, z_loss):
    """Also where a rank's share is all padding, or no label is in it."""
    results = ranks.run(
        cross_entropy_on_rank, kind, padded, scale, torch.float64, z_loss, world_size=size
    )
    logits = logits_of(scale).requires_grad_()
    expected = torchs_losses(logits, kind, z_loss)
    (expected * 0.125).sum().backward()
    for losses, _ in results:
        dense.assert_equal(losses, expected.detach(), "losses")
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
    for losses, _ in results:
        assert abs(losses[0] - expected) <= N * VOCAB * u * 10


def test_second_backward_is_refused():
    """The first has turned the logits' memory into the gradient."""
    logits = logits_of(1.0).requires_grad_()
    loss, _ = vocab_parallel_cross_entropy(
        logits * 1.0, labels_of("all valid"), VOCAB, Axis.single("tp")
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def communication_on_rank() -> dict:
    axis = dense.axis_of_all()
    logits = dense.random(1, N, 32).requires_grad_()
    with Ledger([axis]) as ledger:
        losses = vocab_parallel_cross_entropy(logits * 1.0, labels_of("all valid"), VOCAB, axis)
        losses.sum().backward()
    return ledger.totals()


def test_three_numbers_a_token_are_all_that_is_communicated(ranks):
    """Logits, 32 numbers a token here, never are."""
    for totals in ranks.run(communication_on_rank, world_size=2):
        assert totals == {("tp", "all_reduce"): (2, 3 * N * 8)}


# ------------------------------------------------------------------------------------------------
# In chunks

H, COLUMNS = 12, 64


def losses_in_chunks(chunk: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Losses, and gradients of an eighth of their sum by hidden states and weight; in one piece by
    autograd if `chunk` is 0."""
    axis = dense.axis_of_all()
    hidden = dense.random(1, N, H).to(dtype).requires_grad_()
    whole = dense.random(2, COLUMNS, H).to(dtype)
    weight = whole.chunk(axis.size)[axis.rank].clone().requires_grad_()

    def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_losses(logits, labels, VOCAB, axis, z_loss=0.01)

    labels = labels_of("some ignored")
    if chunk:
        losses = chunked_losses(hidden, weight, labels, chunk, losses_of)
        with torch.no_grad():
            evaluated = chunked_losses(hidden, weight, labels, chunk, losses_of)
        assert torch.equal(evaluated, losses.detach())
    else:
        losses = losses_of(F.linear(hidden, weight), labels)
    losses.backward(torch.full_like(losses, 0.125))
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 8, 24, 100])
def test_losses_in_chunks_equal_those_in_one_piece(ranks, chunk, size):
    """Also where the last chunk is smaller, or the only one."""
    for found, expected in zip(
        ranks.run(losses_in_chunks, chunk, torch.float64, world_size=size),
        ranks.run(losses_in_chunks, 0, torch.float64, world_size=size),
        strict=True,
    ):
        for mine, theirs in zip(found, expected, strict=True):
            dense.assert_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_chunks_are_summed_up_in_float32(ranks, dtype):
    """The weight's is off by a rounding of each chunk's product and one of the sum."""
    ((_, _, found),) = ranks.run(losses_in_chunks, 1, dtype, world_size=1)
    ((_, _, expected),) = ranks.run(losses_in_chunks, 0, torch.float64, world_size=1)
    assert found.dtype == dtype
    u = torch.finfo(dtype).eps / 2
    # Hidden states, weight, logits, their gradient and the product are rounded.
    assert (found - expected).abs().max() <= 16 * u * expected.abs().max()


def test_no_more_than_a_chunk_of_logits_exists():
    """Of 24 x 64 logits, in bf16 and float32, 4 x 64, and the gradients of no other 4 x 64; after
    the forward none."""
    hidden = torch.randn(N, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(COLUMNS, H, dtype=torch.bfloat16, requires_grad=True)
    seen: list[tuple[int, ...]] = []
    earlier: list[StorageWeakRef] = []

    def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
        assert all(storage.expired() for storage in earlier)
        seen.append(tuple(logits.shape))
        logits.register_hook(lambda grad: earlier.append(StorageWeakRef(grad.untyped_storage())))
        earlier.append(StorageWeakRef(logits.untyped_storage()))
        return token_losses(logits, labels, VOCAB, Axis.single("tp"), 0.0)

    labels = labels_of("all valid")
    with Kept([hidden, weight, labels]) as kept:
        losses = chunked_losses(hidden, weight, labels, 4, losses_of)
    assert seen == [(4, COLUMNS)] * 6
    gradients = hidden.numel() * 2 + weight.numel() * 4
    assert kept.bytes() == gradients + losses.numel() * 4
