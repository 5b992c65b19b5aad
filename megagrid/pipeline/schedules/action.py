"""The words of a schedule: actions, and the steps that group them.

    0F2       stage 0 computes the forward of microbatch 2
    0B2       its whole backward: gradient of the input and of the weights
    0I2 0W2   the same in two halves: input gradient (the previous stage waits for it), then
              weight gradient (nobody waits: it fills bubbles)

    0SEND_F2  stage 0 sends its output     →  1RECV_F2  stage 1 receives its input
    1SEND_B2  stage 1 sends the gradient   →  0RECV_B2  stage 0 receives that of its output
              of its input

    0REDUCE_GRAD  stage 0's gradients are complete: sum them over the data-parallel ranks
    0REDUCE_TIED  sum the tied embedding's gradient over its two ends, first and last stage

A SEND names the stage that made the tensor, a RECV the stage that consumes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megagrid.errors import MegagridError


class ScheduleError(MegagridError):
    """A schedule that can't be read, built or run.

    Attributes:
        rule: name of the rule of `verify` that was broken, "" where it's none of those.
        drawing: ranks × steps with the offending one marked, "" where there's none to show. It is
            a note of the exception as well, so that a traceback ends with it.
    """

    def __init__(self, message: str, rule: str = "", drawing: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.drawing = drawing
        if drawing:
            self.add_note(drawing)


class Kind(StrEnum):
    """What an action does; the value is its spelling in a token."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    REDUCE_TIED = "REDUCE_TIED"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
GRADIENTS = frozenset({Kind.B, Kind.W})  # each gives a microbatch's part of the weight gradient
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
REDUCTIONS = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_TIED})

# kind -> (kind of the other end, other end's stage minus this one's)
_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}

_TOKEN = re.compile(
    r"(?P<stage>\d+)"
    r"(?:(?P<kind>F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(?P<microbatch>\d+)"
    r"|(?P<reduction>REDUCE_GRAD|REDUCE_TIED))"
)


class Action(NamedTuple):
    """One thing that one rank does for one stage; a tuple, for it is hashed all the time.

    Attributes:
        stage: global stage, 0 holds the embedding.
        kind: what is done.
        microbatch: 0 … m-1; None for a reduction, which concerns the whole step.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def other_end(self) -> Action:
        """The RECV that takes this SEND's tensor, or the SEND that feeds this RECV."""
        kind, offset = _OTHER_END[self.kind]
        return Action(self.stage + offset, kind, self.microbatch)

    @classmethod
    def parse(cls, token: str) -> Action:
        """The action that `str` wrote as `token`.

        Raises:
            ScheduleError: not a token; says what one looks like.
        """
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ScheduleError(
                f"{token!r} is no action; one is a stage, a kind and a microbatch, such as 2F0, "
                f"2I0, 2SEND_F0 or 0REDUCE_GRAD (kinds: {', '.join(Kind)})"
            )
        if match["reduction"]:
            return cls(int(match["stage"]), Kind(match["reduction"]))
        return cls(int(match["stage"]), Kind(match["kind"]), int(match["microbatch"]))


@dataclass(frozen=True)
class Step:
    """What a rank does at once: one compute action, one reduction, or one batch of messages.

    The messages of a batch are posted together (one `batch_isend_irecv`) and the rank goes on; it
    waits for a RECV where its tensor is consumed, and for a SEND before its buffer is reused.
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        messages = [action.kind in _OTHER_END for action in self.actions]
        if not self.actions or (len(self.actions) > 1 and not all(messages)):
            raise ScheduleError(
                f"step {str(self)!r}: only SEND and RECV may share a step, and none is empty"
            )

    @classmethod
    def of(cls, *actions: Action) -> Step:
        return cls(actions)

    @classmethod
    def parse(cls, text: str) -> Step:
        """The step that `str` wrote as `text`: tokens joined by ``+``."""
        return cls(tuple(Action.parse(token) for token in text.split("+")))

    def __str__(self) -> str:
        return "+".join(str(action) for action in self.actions)

    @cached_property
    def is_compute(self) -> bool:
        return self.actions[0].kind in COMPUTE

    @cached_property
    def is_batch(self) -> bool:
        """Whether the step is messages; it is a reduction if neither this nor `is_compute`."""
        return self.actions[0].kind in _OTHER_END

    @property
    def action(self) -> Action:
        """The single action of a compute or reduction step."""
        (action,) = self.actions
        return action

    @property
    def batch(self) -> tuple[Action, ...]:
        """The messages of the step, () for a compute action or a reduction."""
        return self.actions if self.is_batch else ()
