"""A stage on its rank: a piece of the model, and what of a step is in flight through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megagrid.data_parallel.sharding import GradientSync
from megagrid.grid.grid import Axis
from megagrid.model.decoder import DecoderStage
from megagrid.nn.dropout import DropoutStreams
from megagrid.nn.layout import ParameterShard
from megagrid.nn.split_backward import LateWeightGradients


@dataclass(frozen=True)
class Microbatch:
    """What one forward takes, on the rank's device.

    Attributes:
        tokens: (b, s) int64.
        labels: (b, s) int64, -100 where nothing is to be learnt.
        streams: of dropout; None in an evaluation.
        positions, documents: see `DecoderStage.forward`.
    """

    tokens: Tensor
    labels: Tensor
    streams: DropoutStreams | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None


@dataclass
class Stage:
    """A stage of the pipeline.

    Attributes:
        module: the piece of the model.
        shards: what this rank holds of its parameters.
        updated: what the rank's optimizer updates of them.
        sync: when its gradients are reduced over dp.
        late: where backward puts off the gradients of matrices, if the schedule splits it.
    """

    module: DecoderStage
    shards: Sequence[ParameterShard]
    updated: Sequence[ParameterShard]
    sync: GradientSync
    late: LateWeightGradients | None = None
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _outputs: dict[int, GradientEdge] = field(default_factory=dict)
    _late: dict[int, LateWeightGradients] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.module.share.is_first

    @property
    def is_last(self) -> bool:
        return self.module.share.is_last

    @property
    def in_flight(self) -> int:
        """Microbatches of which something is kept for a backward, or half of one, to come."""
        return len(self._outputs.keys() | self._late.keys())

    def kept(self) -> Iterator[Tensor]:
        """What is kept for a backward, or half of one, to come, as far as autograd doesn't keep it:
        the inputs, and what late gradients will be made from."""
        yield from self._inputs.values()
        for late in (self.late, *self._late.values()):
            if late is not None:
                yield from late.kept()

    def forward(self, number: int, microbatch: Microbatch, x: Tensor | None) -> Tensor:
        """Compute microbatch `number`.

        What backward needs is kept: the input, for its gradient, and the place in the graph where
        the output was made, but not the output, whose memory is free once it has been sent.

        Args:
            x: what the stage before sent; None on the first stage.

        Returns:
            hidden states for the next stage, or on the last stage the losses summed over tokens.
        """
        grad_enabled = torch.is_grad_enabled()
        if x is not None and grad_enabled:
            x.requires_grad_()
        output = self.module(
            microbatch.tokens if x is None else x,
            labels=microbatch.labels if self.is_last else None,
            streams=microbatch.streams,
            positions=microbatch.positions,
            documents=microbatch.documents,
        )
        if grad_enabled:
            self._outputs[number] = get_gradient_edge(output)
            if x is not None:
                self._inputs[number] = x
        return output.detach()

    def backward(self, number: int, grad: Tensor, *, is_last: bool) -> Tensor | None:
        """Compute the gradients of microbatch `number`.

        Args:
            grad: of the output.
            is_last: no backward of this stage follows in the step.

        Returns:
            the gradient of the input; None on the first stage.
        """
        if self.late is None:
            return self._backward(number, grad, is_last=is_last)
        input_grad = self.backward_input(number, grad)
        self.backward_weight(number, is_last=is_last)
        return input_grad

    def backward_input(self, number: int, grad: Tensor) -> Tensor | None:
        """The half of `backward` that the stage before waits for."""
        input_grad = self._backward(number, grad, is_last=False)
        self._late[number] = self.late.take()
        return input_grad

    def backward_weight(self, number: int, *, is_last: bool) -> None:
        """The other half: the gradients of matrices, any time after `backward_input`."""
        self._late.pop(number).compute()
        self.sync.after_late_gradients(is_last=is_last)

    def _backward(self, number: int, grad: Tensor, *, is_last: bool) -> Tensor | None:
        self.sync.before_backward(is_last=is_last)
        torch.autograd.backward([self._outputs.pop(number)], [grad])
        x = self._inputs.pop(number, None)
        return None if x is None else x.grad

    def summands(self, axis: Axis) -> list[Tensor]:
        """The gradients of which each rank of `axis` has just a summand.

        They are norms and biases under sequence parallelism, shared key/value heads, and a tied
        embedding in two stages. They are added up once a step, after the reduction over dp: on
        shards, not on whole parameters; sums may be taken in either order.
        """
        return [
            shard.grad[rows]
            for shard in self.shards
            if shard.grad is not None
            for piece, rows in shard.boxes
            if axis in piece.partial
        ]

    def tied_summands(self) -> list[Tensor]:
        """Those of a table that is also in the stage at the pipeline's other end."""
        return self.summands(self.module.axes.embedding)
