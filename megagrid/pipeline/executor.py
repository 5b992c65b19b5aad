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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megagrid.comm.collectives import all_reduce_coalesced
from megagrid.comm.p2p import Message, Pending, post
from megagrid.grid.grid import Grid
from megagrid.nn.loss import LOSSES
from megagrid.pipeline.clock import DeviceClock
from megagrid.pipeline.schedules import Action, Kind, Program, Span
from megagrid.pipeline.stage import Microbatch, Stage

SENDS_UNDER_WAY = 2
"""Messages, times the ranks of the pipeline, that a rank has posted and not yet seen sent."""


@dataclass
class _Step:
    """The state of one run through a program.

    Attributes:
        inputs, grads: what a F or B of a stage and microbatch consumes, received or handed over.
        outputs: what a F or B has made and a send takes.
        sends: under way.
        losses: summed over the tokens of this rank's microbatches, on the last stage.
        spans: when each compute action ran, if that is asked for.
        around: entered around each.
        clock: takes their time on an accelerator.
    """

    program: Program
    microbatches: Sequence[Microbatch]
    loss_scale: Callable[[], Tensor] | None
    losses: Tensor
    spans: list[Span] | None = None
    around: Callable[[Action], AbstractContextManager[None]] = nullcontext
    clock: DeviceClock | None = None
    inputs: dict[tuple[int, int], Pending | Tensor] = field(default_factory=dict)
    grads: dict[tuple[int, int], Pending | Tensor] = field(default_factory=dict)
    outputs: dict[Action, Tensor] = field(default_factory=dict)
    sends: list[Pending] = field(default_factory=list)

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Note when the block, which is `action`'s own work and no waiting, begins and ends."""
        if self.spans is None:
            with self.around(action), self.clock.span() if self.clock else nullcontext():
                yield
            return
        start = self._now()
        with self.around(action):
            yield
        self.spans.append(Span(action, start, self._now()))

    def _now(self) -> float:
        if self.losses.device.type != "cpu":
            # What a device has been given to do is done only when it says so.
            torch.accelerator.synchronize(self.losses.device)
        return time.time()


class Executor:
    """Runs programs on this rank's stages.

    Args:
        stages: this rank's, by number.
        dtype: of the hidden states between stages.

    Attributes:
        clock: of the device, if the actions of steps are to be timed there.
    """

    def __init__(self, stages: Mapping[int, Stage], grid: Grid, dtype: torch.dtype) -> None:
        self.stages = stages
        self._grid = grid
        self._dtype = dtype
        self.clock: DeviceClock | None = None
        self._run_action = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.REDUCE_GRAD: self._reduce_grad,
            Kind.REDUCE_TIED: self._reduce_tied,
        }

    def run(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        loss_scale: Callable[[], Tensor] | None = None,
        spans: list[Span] | None = None,
        around: Callable[[Action], AbstractContextManager[None]] | None = None,
    ) -> Tensor:
        """Run `program` on `microbatches`; gradients are added to the parameters'.

        Args:
            loss_scale: the gradient of the step's loss by the summed losses, a scalar: one over the
                valid tokens of the whole grid. Called when the first backward needs it. Programs
                without backward need none.
            spans: gets when each compute action ran, in seconds since the epoch. On an
                accelerator it costs the overlap of one action with the next.
            around: what each compute action is made in; by default nothing.

        Returns:
            the losses of `megagrid.nn.loss` summed over this rank's tokens, (2,), float64; zero
            away from the last stage.
        """
        zero = torch.zeros(LOSSES, dtype=torch.float64, device=self._grid.device)
        clock = None if program.forward_only else self.clock
        step = _Step(program, microbatches, loss_scale, zero, spans, around or nullcontext, clock)
        with torch.set_grad_enabled(not program.forward_only):
            for item in program.steps[self._grid.pp.rank]:
                if item.is_batch:
                    self._communicate(step, item.batch)
                else:
                    self._run_action[item.action.kind](step, item.action)
        for pending in step.sends:
            pending.wait()
        return step.losses

    def _forward(self, step: _Step, action: Action) -> None:
        stage = self.stages[action.stage]
        x = None if stage.is_first else _take(step.inputs, action)
        with step.timed(action):
            output = stage.forward(action.microbatch, step.microbatches[action.microbatch], x)
        if stage.is_last:
            step.losses += output
        else:
            self._pass_on(step, output, action, Kind.SEND_F, action.stage + 1, step.inputs)

    def _backward(self, step: _Step, action: Action) -> None:
        is_last = self._completes_gradients(step, action)
        backward = partial(self.stages[action.stage].backward, is_last=is_last)
        self._pass_back(step, action, backward)

    def _backward_input(self, step: _Step, action: Action) -> None:
        self._pass_back(step, action, self.stages[action.stage].backward_input)

    def _backward_weight(self, step: _Step, action: Action) -> None:
        with step.timed(action):
            self.stages[action.stage].backward_weight(
                action.microbatch, is_last=self._completes_gradients(step, action)
            )

    def _completes_gradients(self, step: _Step, action: Action) -> bool:
        return action == step.program.last_gradient(action.stage)

    def _pass_back(
        self, step: _Step, action: Action, backward: Callable[[int, Tensor], Tensor | None]
    ) -> None:
        """Take the output's gradient, compute the input's, and see that it gets where it goes."""
        stage = self.stages[action.stage]
        grad = step.loss_scale().expand(LOSSES) if stage.is_last else _take(step.grads, action)
        with step.timed(action):
            grad = backward(action.microbatch, grad)
        if not stage.is_first:
            self._pass_on(step, grad, action, Kind.SEND_B, action.stage - 1, step.grads)

    def _reduce_grad(self, step: _Step, action: Action) -> None:
        for axis in (self._grid.tp, self._grid.kv):
            summands = self.stages[action.stage].summands(axis)
            all_reduce_coalesced(summands, axis, self._grid.device)

    def _reduce_tied(self, step: _Step, action: Action) -> None:
        """Sum the gradient of a tied embedding over its two ends: two ranks, or two stages here."""
        last = step.program.num_stages - 1
        if action.stage != last and last in self.stages:
            first_end, last_end = self.stages[action.stage], self.stages[last]
            pairs = zip(first_end.tied_summands(), last_end.tied_summands(), strict=True)
            for mine, theirs in pairs:
                mine += theirs
                theirs.copy_(mine)
        else:
            summands = self.stages[action.stage].tied_summands()
            all_reduce_coalesced(summands, self._grid.embedding, self._grid.device)

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
        # On gloo a send is completed only by waiting for it, and holds its tensor until then. No
        # program deadlocks if ranks wait for their batches, and so old a message has long arrived.
        while len(step.sends) > SENDS_UNDER_WAY * self._grid.pp.size:
            step.sends.pop(0).wait()

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
