"""What a step takes of a rank's memory and of its links, of an engine with real tensors or fake.

kind                  what
--------------------  ------------------------------------------------------------------------
weights               this rank's shards of the parameters
optimizer             their moments
gathered parameters   whole ones, in the compute dtype
gradients             of shards, and of whole parameters until they are reduced
inputs                token ids and labels
activations           what an action keeps for a later one: for its backward, or the late half
communication         messages between stages; what fully_shard gathers into and reduces from
temporary             the rest: what lives within one action or update

With `memory.cpu_offload` the host has the weights, the optimizer states, the gradients of shards
and what an update makes; with `memory.activation_offload` what layers keep. Where the host is the
device, as on a CPU, they are told apart all the same. Then a unit's own shards aren't copied before
they are gathered, nor its reduced gradients after: on an accelerator they are on both for a moment.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrid.comm.ledger import Call, Ledger
from megagrid.data import Batch
from megagrid.data_parallel.sharding import held_by_fully_shard
from megagrid.dryrun.storages import Peak, Tracker
from megagrid.nn.offload import Lane
from megagrid.pipeline.schedules import Action, Kind
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients

BUFFERED = ("dp", "dp_cp", "pp")
"""Axes whose collectives have buffers of their own; those of the others work on activations."""


@dataclass(frozen=True)
class Measurement:
    """What a step of one rank takes.

    Attributes:
        resting: bytes by kind between two steps, on the device.
        peak: the most that is live there at once within a step; `where` is the action or part of
            it.
        host_resting, host_peak: the same of what lies in the host's memory.
        calls: what the step communicates, as a ledger counts it.
    """

    resting: dict[str, int]
    peak: Peak
    host_resting: dict[str, int]
    host_peak: Peak
    calls: Counter[Call]


def measure(engine: Engine, batches: Sequence[Batch]) -> Measurement:
    """Make two steps and measure the second: the first one makes what stays.

    Collective over all ranks.

    Args:
        batches: this dp rank's microbatches, of both steps.
    """
    kinds = _Kinds(engine)
    ledger = Ledger(engine.grid.axes.values(), kinds.see_call)
    gc.collect()  # cycles of what was built, which would end no one knows when
    # What a compiled block keeps can't be seen from outside: it is measured as it would be without.
    with torch.compiler.set_stance("force_eager"), kinds.tracker, ledger, kinds.lanes_seen():
        kinds.label_resting()
        for step in (1, 2):
            resting = kinds.begin_step()
            ledger.calls.clear()
            result = compute_gradients(engine, batches, step, kinds.watch, around=kinds.around)
            with kinds.watch.part("optimizer"), kinds.at_states():
                apply_gradients(engine, result.grad_norm, engine.config.optimizer.lr)
    device, host = kinds.places
    return Measurement(resting[0], device.peak, resting[1], host.peak, ledger.calls)


class _Kinds:
    """Tells a tracker what the storages of an engine's step hold.

    Some are known by who refers to them: weights, gradients, what fully_shard has gathered. Others
    show by how long they live: what a forward has made and leaves behind is there for its backward.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._action: Action | None = None
        self.tracker = Tracker(engine.grid.device.type, self._see_peak)
        self.watch = _Parts(self.tracker)
        self.places = self.tracker.device, self.tracker.host
        self._offloads = engine.config.memory.cpu_offload
        self._of_states = self.places[self._offloads]

    @contextmanager
    def lanes_seen(self) -> Iterator[None]:
        """What the stages' layers copy to the host counts there."""
        modules = [stage.module for stage in self._engine.executor.stages.values()]
        lanes = [module.lane for module in modules]
        for module, lane in zip(modules, lanes, strict=True):
            module.lane = lane and _SeenLane(lane.device, self.tracker)
        yield
        for module, lane in zip(modules, lanes, strict=True):
            module.lane = lane

    def at_states(self) -> AbstractContextManager[None]:
        """What the block makes of the gradients that there are lies where the optimizer's states
        do."""
        self._label_gradients()
        return self.tracker.on_host() if self._offloads else nullcontext()

    def label_resting(self) -> None:
        """What is there before the first step."""
        weights = (shard.tensor for shard in self._engine.shards)
        self.tracker.label("weights", weights, self._of_states)
        optimizer = self._engine.optimizer
        for name in optimizer.state_names:
            states = (state for state in optimizer.states(name) if state is not None)
            self.tracker.label("optimizer states", states, self._of_states)

    def begin_step(self) -> list[dict[str, int]]:
        """Look for the peaks of the step that begins; returns what is live before it, by place and
        kind."""
        for gathered, _ in self._held():
            self.tracker.label("gathered parameters", gathered)
        resting = [self.tracker.live_by_kind(place) for place in self.places]
        self.tracker.reset_peaks()
        return resting

    def see_call(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """A collective has been issued on `tensors`."""
        if call.axis in BUFFERED:
            self.tracker.label("communication", tensors, self.tracker.device)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Label what `action` leaves behind for its backward."""
        self._action, made = action, self.tracker.made
        yield
        if action.kind is Kind.F:
            self.tracker.label("activations", self._engine.executor.stages[action.stage].kept())
            self.tracker.label_since(made, "activations")
        self._action = None

    def _see_peak(self) -> None:
        for gathered, gradients in self._held():
            self.tracker.label("gathered parameters", gathered)
            self.tracker.label("gradients", gradients)
        for stage in self._engine.executor.stages.values():
            self.tracker.label("activations", stage.kept())
        self._label_gradients()
        self.tracker.where = str(self._action) if self._action else self.watch.running

    def _label_gradients(self) -> None:
        grads = (shard.grad for shard in self._engine.shards)
        shards = (grad for grad in grads if grad is not None)
        self.tracker.label("gradients", shards, self._of_states)

    def _held(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        for stage in self._engine.executor.stages.values():
            yield from held_by_fully_shard(stage.module)


class _SeenLane(Lane):
    """Tells a tracker what it copies to the host."""

    def __init__(self, device: torch.device, tracker: Tracker) -> None:
        super().__init__(device)
        self._tracker = tracker

    def host_like(self, source: Tensor) -> Tensor:
        with self._tracker.on_host():
            return super().host_like(source)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._tracker.label("activations", (source, target))
        super().copy(source, target)


class _Parts(Stopwatch):
    """Knows which part of a step is running.

    Attributes:
        running: its name.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.running = ""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the block as part `name`; what "data" makes and leaves behind are inputs."""
        self.running, made = name, self._tracker.made
        yield
        if name == "data":
            self._tracker.label_since(made, "inputs")
        self.running = ""
