"""Messages between ranks of the pipeline, posted together and waited for where they are needed.

Both ends know a message's shape and dtype beforehand: nothing but its data travels. Batches are
what keeps two ranks that both begin by sending from waiting for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megagrid.grid.grid import Axis


@dataclass(frozen=True)
class Message:
    """One tensor to send, or to receive into.

    Attributes:
        tensor: contiguous.
        peer: index along the axis.
        is_send: direction.
    """

    tensor: Tensor
    peer: int
    is_send: bool


@dataclass(frozen=True)
class Pending:
    """A message under way. Until `wait` its tensor must stay as it is, and this be kept: a work
    that is dropped cancels its message."""

    message: Message
    work: dist.Work
    axis: Axis

    def wait(self) -> Tensor:
        """The message's tensor, once it has been sent or received."""
        self.work.wait()
        return self.message.tensor


def post(messages: Sequence[Message], axis: Axis) -> list[Pending]:
    """Begin all `messages` at once, without waiting; one handle for each, in order."""
    operations = [
        dist.P2POp(
            dist.isend if message.is_send else dist.irecv,
            message.tensor,
            axis.ranks[message.peer],
            group=axis.group,
        )
        for message in messages
    ]
    works = dist.batch_isend_irecv(operations)
    # NCCL makes one operation of the batch, gloo one of each message.
    works = works * len(messages) if len(works) == 1 else works
    return [Pending(message, work, axis) for message, work in zip(messages, works, strict=True)]
