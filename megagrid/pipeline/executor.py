"""Runs a program: whatever the schedule, one action after the other, as the list says.

list of this rank        what happens
---------------------    -----------------------------------------------------------------
1RECV_F3                 a receive is posted; the rank goes on
1F3                      waits for that receive, computes, keeps the output for its send
1SEND_F3+1RECV_B1        both are posted at once; the rank goes on
1B1                      waits for the gradient, computes, keeps the input's gradient
1REDUCE_GRAD             gradients that tp ranks have summands of are added up
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megagrid.comm.p2p import Message, Pending, post
from megagrid.grid.grid import Grid
from megagrid.pipeline.schedules import Action, Kind, Program
from megagrid.pipeline.stage import Microbatch, Stage


@dataclass
class _Step:
    """The state of one run through a program.

    Attributes:
        inputs, grads: what a F or B of a stage and microbatch consumes, received or handed over.
        outputs: what a F or B has made and a send takes.
        sends: under way.
        loss: summed over the tokens of this rank's microbatches, on the last stage.
    """

    program: Program
    microbatches: Sequence[Microbatch]
    loss_scale: Callable[[], Tensor] | None
    loss: Tensor
    inputs: dict[tuple[int, int], Pending | Tensor] = field(default_factory=dict)
    grads: dict[tuple[int, int], Pending | Tensor] = field(default_factory=dict)
    outputs: dict[Action, Tensor] = field(default_factory=dict)
    sends: list[Pending] = field(default_factory=list)


class Executor:
    """Runs programs on this rank's stages.

    Args:
        stages: this rank's, by number.
        dtype: of the hidden states between stages.
    """

    def __init__(self, stages: Mapping[int, Stage], grid: Grid, dtype: torch.dtype) -> None:
        self.stages = stages
        self._grid = grid
        self._dtype = dtype
        self._run_action = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.REDUCE_GRAD: self._reduce_grad,
            Kind.REDUCE_TIED: self._reduce_tied,
        }

    def run(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        loss_scale: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Run `program` on `microbatches`; gradients are added to the parameters'.

        Args:
            loss_scale: the gradient of the step's loss by the summed loss, a scalar: one over the
                valid tokens of the whole grid. Called when the first backward needs it. Programs
                without backward need none.

        Returns:
            the loss summed over this rank's tokens, float64; zero away from the last stage.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._grid.device)
        step = _Step(program, microbatches, loss_scale, zero)
        with torch.set_grad_enabled(not program.forward_only):
            for item in program.steps[self._grid.pp.rank]:
                if item.is_batch:
                    self._communicate(step, item.batch)
                else:
                    self._run_action[item.action.kind](step, item.action)
        for pending in step.sends:
            pending.wait()
        return step.loss

    def _forward(self, step: _Step, action: Action) -> None:
        stage = self.stages[action.stage]
        x = None if stage.is_first else _take(step.inputs, action)
        output = stage.forward(action.microbatch, step.microbatches[action.microbatch], x)
        if stage.is_last:
            step.loss += output
        else:
            self._pass_on(step, output, action, Kind.SEND_F, action.stage + 1, step.inputs)

    def _backward(self, step: _Step, action: Action) -> None:
        stage = self.stages[action.stage]
        grad = step.loss_scale() if stage.is_last else _take(step.grads, action)
        is_last = action == step.program.last_gradient(action.stage)
        grad = stage.backward(action.microbatch, grad, is_last=is_last)
        if not stage.is_first:
            self._pass_on(step, grad, action, Kind.SEND_B, action.stage - 1, step.grads)

    def _reduce_grad(self, step: _Step, action: Action) -> None:
        for axis in (self._grid.tp, self._grid.kv):
            self.stages[action.stage].sum_partial_gradients(axis)

    def _reduce_tied(self, step: _Step, action: Action) -> None:
        self.stages[action.stage].sum_partial_gradients(self._grid.embedding)

    def _pass_on(
        self,
        step: _Step,
        tensor: Tensor,
        action: Action,
        kind: Kind,
        to_stage: int,
        local: dict[tuple[int, int], Pending | Tensor],
    ) -> None:
        """Keep `tensor` for its send, or hand it to a stage of this same rank."""
        if to_stage in self.stages:
            local[to_stage, action.microbatch] = tensor
        else:
            step.outputs[Action(action.stage, kind, action.microbatch)] = tensor

    def _communicate(self, step: _Step, batch: Sequence[Action]) -> None:
        messages = [self._message(step, action) for action in batch]
        for action, pending in zip(batch, post(messages, self._grid.pp), strict=True):
            key = action.stage, action.microbatch
            if action.kind is Kind.RECV_F:
                step.inputs[key] = pending
            elif action.kind is Kind.RECV_B:
                step.grads[key] = pending
            else:
                step.sends.append(pending)
        step.sends = [pending for pending in step.sends if not pending.work.is_completed()]

    def _message(self, step: _Step, action: Action) -> Message:
        peer = step.program.peer(action)
        if action in step.outputs:
            return Message(step.outputs.pop(action).contiguous(), peer, is_send=True)
        batch, seq_length = step.microbatches[action.microbatch].tokens.shape
        shape = self.stages[action.stage].module.hidden_shape(batch, seq_length)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._grid.device)
        return Message(buffer, peer, is_send=False)


def _take(waiting: dict[tuple[int, int], Pending | Tensor], action: Action) -> Tensor:
    """What `action` consumes, waited for if it comes from another rank."""
    item = waiting.pop((action.stage, action.microbatch))
    return item.wait() if isinstance(item, Pending) else item
