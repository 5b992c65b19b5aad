"""Where the first NaN or Inf of a step comes from: the step made once more, and looked at.

A step is a function of weights, samples and its number, so made again it goes wrong again. This
time every module's output and the gradient of every output are looked at, as well as the weights
before and the gradients of the parameters after. Of what isn't finite, the first made the rest so:

    0  a parameter, before the step
    1  forward:   the output of a module; by microbatch, then stage, then in the order of modules
    2  backward:  the gradient of a module's output; by microbatch, and stages the other way round
    3  the gradient of a parameter, reduced, after the last backward

A value can only spoil what comes after it in this order. Ranks along tp and dp run the same modules
in the same order, so the same order tells which of them was first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megagrid.checkpoint.together import gather
from megagrid.data import Batch
from megagrid.nn.layout import ParameterShard
from megagrid.pipeline.schedules import Action, Kind
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import compute_gradients, drop_gradients

Order = tuple[int, int, int, int]
"""Phase (see above), microbatch, distance of the stage from where the phase begins, and place in
the order of modules or parameters."""


@dataclass(frozen=True, order=True)
class Sighting:
    """Something that isn't finite; the least is the first.

    Attributes:
        rank: that saw it.
        what: it is, in words.
    """

    order: Order
    rank: int
    what: str


def find_nan(engine: Engine, batches: Sequence[Batch], step: int, loss_scale: float) -> str:
    """Make `step` again, without an update, and say what was the first to hold a NaN or Inf.

    Collective over all ranks. The weights must be as before the step, and gradients dropped; so
    they are afterwards.
    """
    watcher = _Watcher(engine)
    watcher.look_at_parameters(lambda shard: shard.tensor, 0, "parameter {name}")
    with watcher.hooks(), torch.compiler.set_stance("force_eager"):
        compute_gradients(
            engine, batches, step, Stopwatch(), loss_scale=loss_scale, around=watcher.around
        )
    watcher.look_at_parameters(lambda shard: shard.grad, 3, "backward: gradient of {name}")
    drop_gradients(engine)
    firsts = [first for first in gather(watcher.first, engine.grid.world) if first is not None]
    if not firsts:
        return "find-nan: made again, the step was finite"
    first = min(firsts)
    where = engine.grid.placement.coordinate(first.rank)
    _, microbatch, *_ = first.order
    part = f", microbatch {microbatch}" if first.order[0] in (1, 2) else ""
    return f"find-nan: step {step}{part}, {first.what}, on rank {first.rank} ({where})"


@dataclass
class _Watcher:
    """What one rank sees of a step.

    Attributes:
        first: of all that isn't finite.
    """

    engine: Engine
    first: Sighting | None = None
    _action: Action | None = None
    _place: int = 0
    _stages: int = field(init=False)

    def __post_init__(self) -> None:
        self._stages = self.engine.training.num_stages

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Know that what is seen in the block is of `action`."""
        self._action, self._place = action, 0
        yield
        self._action = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at every module's output and its gradient in the block."""
        with ExitStack() as stack:
            for stage in self.engine.executor.stages.values():
                for name, module in stage.module.named_modules():
                    if name or stage.is_last:
                        hook = module.register_forward_hook(self._after(name or "the loss"))
                        stack.callback(hook.remove)
            yield

    def look_at_parameters(
        self, tensor_of: Callable[[ParameterShard], Tensor | None], phase: int, what: str
    ) -> None:
        """At `tensor_of` each parameter's shard, box by box.

        Args:
            what: to say of it, with a place for its name.
        """
        place = 0
        for number, stage in sorted(self.engine.executor.stages.items()):
            for shard in stage.shards:
                values = tensor_of(shard)
                for piece, rows in shard.boxes if values is not None else ():
                    place += 1
                    found = _first_bad(values[rows])
                    if found is not None:
                        value, index = found
                        whole = [o + i for o, i in zip(piece.box.offsets, index, strict=True)]
                        told = f"{what.format(name=piece.name)}: {value} at {whole}"
                        self._see((phase, 0, number, place), told)

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """The hook of the module `name`."""

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or self._action is None:
                return
            if self._action.kind is Kind.F:  # and not once more, recomputed in a backward
                what = f"forward: activation, output of {name}"
                self._look(output, 1, self._action.stage, what)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._look_back(gradient, name))

        return look

    def _look_back(self, gradient: Tensor, name: str) -> None:
        if self._action is not None:
            distance = self._stages - self._action.stage
            self._look(gradient, 2, distance, f"backward: gradient of the output of {name}")

    def _look(self, values: Tensor, phase: int, distance: int, what: str) -> None:
        self._place += 1
        found = _first_bad(values.detach())
        if found is not None:
            order = (phase, self._action.microbatch, distance, self._place)
            self._see(order, f"{what}: {found[0]}")

    def _see(self, order: Order, what: str) -> None:
        seen = Sighting(order, self.engine.grid.rank, what)
        if self.first is None or seen < self.first:
            self.first = seen


def _first_bad(values: Tensor) -> tuple[str, list[int]] | None:
    """The first value that isn't finite, "NaN" or "Inf", and its index."""
    bad = ~torch.isfinite(values)
    if not bad.any():
        return None
    index = bad.nonzero()[0].tolist()
    return "NaN" if torch.isnan(values[tuple(index)]) else "Inf", index
