"""What an action of a stage holds at the moments that may be the peak, in closed form. Pure.

Temporary are, beside what is kept and less what has been let go of:

    forward of a layer          e n h + e n' h      its last product, its output
    … of the loss               e n V               the logits in the compute dtype
    … in chunks of c            e n h + r c V       its input, a chunk of logits; if they are cast,
                                … + 2 e c V         those too, and their gradient,
                                … e (c V + V h)     or that and the head's product
    backward of the loss        e n V               its gradient in the compute dtype,
                                … + e n h + e V h   then the head's two products
    … in chunks                 e V h               the head's gradient in that dtype
    … of a layer, at its        e n' h + e f h      the residual's gradient, the last product's; of
    activation                  + 2 e n u           the activation's: input, output, products
    … at the MLP's first        e n' h + e f h      the same; of this product: the input's, the
    product                     + e n h + e n u     output's, the weight's
                                + e h u

with n, n', e, f as in `megagrid.plan.activations`, u = 2f with a gate, else f, r the bytes of the
master dtype, V columns of the vocabulary; "in the compute dtype" is nothing where it is the master
dtype. A layer that is recomputed has it by then; a weight's gradient that is added to an earlier
one doesn't last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

from megagrid.pipeline.schedules import Action, Kind
from megagrid.plan.stage_bytes import StageBytes


@dataclass(frozen=True)
class Moment:
    """What a rank holds at a moment.

    Attributes:
        action: when; the others as in the table of `megagrid.plan.peak`, in bytes.
    """

    action: str = ""
    weights: int = 0
    optimizer_states: int = 0
    gathered_parameters: int = 0
    gradients: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "action")

    def beside(self, action: Action, **sizes: int) -> Moment:
        """With what the rank holds beside it, in that action."""
        summed = {name: getattr(self, name) + size for name, size in sizes.items()}
        return replace(self, action=str(action), **summed)


def _forward(stage: StageBytes, had: bool, is_last: bool) -> Iterator[Moment]:
    """Of a forward.

    Args:
        had: there are gradients of earlier backwards.
        is_last: no gradient comes after the action's.
    """
    gradients = stage.gradients(*stage.chain, stage.rest) if had else 0
    ahead = stage.config.parallel.forward_prefetch
    for layer in stage.layers:
        unit = stage.unit_of(layer)
        yield Moment(
            gathered_parameters=_at_work(stage, unit),
            gradients=gradients,
            activations=stage.input + stage.passed(layer),
            temporary=stage.entered + stage.hidden,
            # fully_shard keeps the message that it has copied out of until the next one's.
            communication=_messages(stage, unit, unit + 1 + ahead),
        )
    if stage.is_last:
        end = len(stage.chain) - 1
        # Whole logits go out of the head; chunks of them come and go in it.
        in_head = _head_is_apart(stage) and stage.config.train.loss_chunk_tokens
        yield Moment(
            gathered_parameters=_at_work(stage, end if in_head else None),
            gradients=gradients,
            activations=stage.in_flight,
            temporary=_in_losses_forward(stage),
            communication=_messages(stage, end, end + 1),
        )


def _in_losses_forward(stage: StageBytes) -> int:
    chunk = min(stage.config.train.loss_chunk_tokens, stage.tokens)
    columns, narrow = stage.share.vocab_rows, stage.narrow
    if not chunk:
        return narrow * stage.tokens * columns
    head = columns * stage.config.model.hidden_size
    logits = (stage.master + 2 * narrow) * chunk * columns
    return stage.entered + max(logits, narrow * (chunk * columns + head))


def _backward(
    stage: StageBytes, had: bool, is_last: bool, *, is_late: bool = False
) -> Iterator[Moment]:
    """Of a backward: when what is outside the layers is gathered, at the loss, then layer by layer,
    the last one first.

    Args:
        is_late: it puts off the products that make gradients of weights.
    """
    end, ahead = len(stage.chain), stage.config.parallel.backward_prefetch
    start = Moment(
        gathered_parameters=_at_work(stage, None),
        gradients=_gradients(stage, end, 0, had=had, reduces=is_last),
        activations=stage.in_flight,
        communication=_messages(stage, None),
    )
    yield start
    if stage.is_last:
        head = end - 1 if _head_is_apart(stage) else None
        for let_go, temporary, is_in_head in _in_losses_backward(stage):
            reached = head if is_in_head and head is not None else end
            yield replace(
                start,
                gathered_parameters=_at_work(stage, head if is_in_head else None),
                activations=start.activations - let_go,
                temporary=temporary,
                communication=_messages(stage, reached - ahead, reached),
            )
    for layer in reversed(stage.layers):
        unit = stage.unit_of(layer)
        reduced = stage.chain[unit + 1 : unit + 2] if is_last else []
        done = sum(stage.unit_of(other) == unit for other in stage.layers if other > layer)
        late = stage.late_head + (stage.layers[-1] - layer) * stage.late_layer if is_late else 0
        for temporary in _in_layers_backward(stage, layer, had=had, is_late=is_late):
            yield Moment(
                gathered_parameters=_at_work(stage, unit),
                gradients=_gradients(stage, unit, done, had=had, reduces=is_last),
                activations=stage.input + stage.passed(layer) + late,
                temporary=temporary,
                communication=_messages(stage, unit - ahead, unit) + stage.reduced(*reduced),
            )


def _in_losses_backward(stage: StageBytes) -> Iterator[tuple[int, int, bool]]:
    """What has been let go of, what is there instead, and whether the head is at work."""
    columns, h = stage.share.vocab_rows, stage.config.model.hidden_size
    if stage.config.train.loss_chunk_tokens:
        yield 0, stage.narrow * columns * h, True
        return
    gradient = stage.narrow * stage.tokens * columns
    yield 0, gradient, False
    yield (
        stage.loss if gradient else 0,
        gradient + stage.entered + stage.element * columns * h,
        True,
    )


def _in_layers_backward(
    stage: StageBytes, layer: int, *, had: bool, is_late: bool
) -> Iterator[int]:
    """At its activation, then at its MLP's first product; less what has been let go of."""
    recompute, model, e = stage.recompute(layer), stage.config.model, stage.element
    none, rows = stage.rows("none"), stage.rows(recompute)
    f = model.ffn_hidden_size // stage.placement.tp
    up = 2 * f if model.family == "llama" else f
    again = {what: size for what, size in none.items() if what not in rows}
    # The residual's gradient, unless it is the message that has come for it; the last product's,
    # unless it has been added to an earlier one.
    is_message = layer == stage.layers[-1] and not stage.is_last
    always = 0 if is_message else stage.hidden
    always += 0 if is_late or (had and not stage.narrow) else e * f * model.hidden_size
    if recompute == "selective":
        of_norm = (none["norms' own"] + none["norms' outputs"]) // 2
        at_activation = 0
        at_product = of_norm - none["activation's input"]
    else:
        at_activation = sum(again.values()) - none["activation"]
        at_product = at_activation - none["activation's input"]
    if is_late:  # its activation is kept
        always += none["activation"]
    yield always + at_activation + 2 * e * stage.tokens * up
    of_weight = 0 if is_late else e * up * model.hidden_size
    yield always + at_product + stage.entered + e * up * stage.tokens + of_weight


def _late(stage: StageBytes, had: bool, is_last: bool) -> Iterator[Moment]:
    """Of the late half of a backward."""
    yield Moment(gradients=stage.gradients(*stage.chain, stage.rest) if had else 0)


MOMENTS = {
    Kind.F: _forward,
    Kind.B: _backward,
    Kind.I: partial(_backward, is_late=True),
    Kind.W: _late,
}


def _head_is_apart(stage: StageBytes) -> bool:
    return bool(stage.chain) and stage.chain[-1].name == "head"


def _at_work(stage: StageBytes, unit: int | None) -> int:
    """Gathered for a unit of the chain, or for what is outside; nothing where all is held."""
    if stage.sharding.after_forward is False:
        return 0
    return stage.gathered(stage.rest, *([] if unit is None else [stage.chain[unit]]))


def _messages(stage: StageBytes, start: int | None, stop: int = 0) -> int:
    """That units of the chain are gathered by, or what is outside; the embedding isn't, but in a
    forward's begin."""
    if stage.sharding.after_forward is False:
        return 0
    if start is None:
        return stage.buffers(stage.rest)
    units = stage.chain[max(0, start) : max(0, stop)]
    return stage.buffers(*(unit for unit in units if unit.name != "embedding"))


def _gradients(stage: StageBytes, unit: int, done: int, *, had: bool, reduces: bool) -> int:
    """In a backward that has come to `unit` of the chain.

    Args:
        done: layers of the unit that are behind it.
        had: there are those of earlier backwards, to which they are added.
        reduces: the backward reduces them.
    """
    finished = stage.gradients(*stage.chain[unit + 1 :], are_shards=reduces)
    new = stage.element * done * stage.layer_elements
    of_head = stage.element * stage.head_elements if unit < len(stage.chain) else 0
    if had:
        finished += stage.gradients(*stage.chain[: unit + 1], stage.rest)
        if (
            not stage.narrow
        ):  # they are added where they are; a tied table's waits for its other one
            new, of_head = 0, of_head * stage.is_tied
    return finished + new + of_head
