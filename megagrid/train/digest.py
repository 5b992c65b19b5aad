"""Digests of a step, computed on each rank of what it holds and added up over the grid.

What they are and what they are for: `megagrid.train.digest_records`. A rank digests the part of a
tensor that it speaks for, and nothing is counted twice:

    tokens, labels         ranks with tp = cp = pp = 0, each the samples of its dp rank
    hidden states          each stage's; under sequence parallelism the positions of the tp rank,
                           without it the first tp rank's; of cp the rank's positions
    parameters             the boxes that the rank is counted for, as in the gradient norm

Hooks see modules' outputs and their gradients; they are there only in steps that are digested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megagrid import __version__
from megagrid.checkpoint.diff import model_order
from megagrid.checkpoint.together import gather
from megagrid.config.schema import Config
from megagrid.data import Batch
from megagrid.grid import zigzag
from megagrid.grid.placement import AXES
from megagrid.nn import hashing
from megagrid.nn.context import tokens_of
from megagrid.nn.layout import ParameterShard, Piece
from megagrid.optim.clip import clip_factor
from megagrid.pipeline.schedules import Action, Kind
from megagrid.train.build import Engine
from megagrid.train.digest_records import FILE_NAME, NUMBERS, PASSES, PROJECTIONS, StepDigests
from megagrid.train.metrics import MetricsLog
from megagrid.train.step import StepResult

_SIGNS = hashing.key("digest")
_ELEMENTS_AT_ONCE = 1 << 18
"""Of a tensor that is digested: a dozen temporary numbers of 8 bytes each."""

_SETTINGS = ("model", "train", "optimizer", "lr_schedule", "data")
"""The sections of a recipe that say what is computed, and not where."""


Around = Callable[[Action], AbstractContextManager[None]]
"""What `compute_gradients` enters around each action."""


class DigestLog:
    """Digests the steps of a run that are due, and writes them on the rank that speaks.

    Args:
        folder: the run's.
        resume_step: last step that the run keeps.
    """

    def __init__(self, engine: Engine, folder: Path, resume_step: int = 0) -> None:
        self._engine = engine
        self._interval = engine.config.logging.digest_interval
        self._settings = _settings(engine)
        self._digest: StepDigest | None = None
        self._knows_weights = False
        self._log = None
        path = folder / FILE_NAME
        if engine.grid.rank == 0 and (self._interval or path.exists()):
            self._log = MetricsLog(path, resume_step, StepDigests)

    @contextmanager
    def of_step(
        self, step: int, batches: Sequence[Batch], loss_scale: float
    ) -> Iterator[Around | None]:
        """Watch the block, which computes the gradients of `step`, if the step is due: the first
        is, and each `interval`-th after it. It is to enter what is yielded around its actions.

        Args:
            batches: this dp rank's microbatches, of whole samples.
        """
        if not self._interval or (step - 1) % self._interval:
            yield None
            return
        self._digest = StepDigest(self._engine, batches, loss_scale)
        if not self._knows_weights:
            self._digest.weights("weights")
            self._knows_weights = True
        with self._digest.hooks():
            yield self._digest.around

    def gradients(self, result: StepResult) -> None:
        """Take in what the block has left."""
        if self._digest is not None:
            self._digest.gradients(result)

    def update(self, result: StepResult, lr: float) -> None:
        """Take in what the optimizer has done at rate `lr`; not told of a step that isn't made."""
        if self._digest is not None:
            largest = self._engine.config.optimizer.clip_grad
            self._digest.update(lr, clip_factor(result.grad_norm, largest))

    def write(self, step: int) -> None:
        """Write what the step's digests are over the grid, if it is due. Collective."""
        if self._digest is None:
            return
        passes = self._digest.gather()
        if self._log is not None:
            self._log.write(StepDigests(step=step, settings=self._settings, passes=passes))
        self._digest = None

    def rewind(self, step: int) -> None:
        """Drop the digests of later steps: the run has gone back to `step`."""
        self._knows_weights = False
        if self._log is not None:
            self._log.rewind(step)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _settings(engine: Engine) -> dict[str, Any]:
    placement = engine.grid.placement
    grid = " x ".join(f"{axis} {placement.size(axis)}" for axis in reversed(AXES))
    return {"megagrid": __version__, "grid": grid, **computed(engine.config)}


def computed(config: Config) -> dict[str, Any]:
    """The keys that say what a run computes."""
    return {
        f"{section}.{key}": value
        for section in _SETTINGS
        for key, value in getattr(config, section).model_dump().items()
    }


class StepDigest:
    """The digests of one step, as far as this rank has them."""

    def __init__(self, engine: Engine, batches: Sequence[Batch], loss_scale: float = 1.0) -> None:
        self._engine = engine
        self._loss_scale = loss_scale
        self._grid = engine.grid
        self._batches = batches
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._numbers: dict[tuple[str, str], float] = {}
        self._action: Action | None = None
        self._data()

    # --- What is digested ------------------------------------------------------------------------

    def weights(self, name: str) -> None:
        """All weights as they are, as the pass `name`."""
        self._parameters(name, self._engine.shards, lambda shard: shard.tensor)

    def gradients(self, result: StepResult) -> None:
        """What `compute_gradients` has left."""
        self._numbers["data", "valid tokens"] = float(result.valid_tokens)
        self._numbers["forward", "loss"] = result.loss
        self._parameters("gradients", self._engine.optimizer.shards, lambda shard: shard.grad)
        self._numbers["gradients", "norm of all"] = result.grad_norm

    def update(self, lr: float, clipping: float) -> None:
        """What `apply_gradients` has done: at which rate, having multiplied gradients by what."""
        self._numbers["update", "learning rate"] = lr
        self._numbers["update", "clipping"] = clipping
        self.weights("update")

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Know that what modules put out in the block is of `action`."""
        self._action = action
        yield
        self._action = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Digest what modules put out in the block, and the gradients of it."""
        with ExitStack() as stack:
            for stage in self._engine.executor.stages.values():
                for place, module in _places(stage.module, self._engine.config.train.compile):
                    handle = module.register_forward_hook(self._hook(place))
                    stack.callback(handle.remove)
            yield

    def gather(self) -> dict[str, dict[str, list[float]]]:
        """All ranks' digests, added up and in the order of a step. Collective."""
        mine = {key: sums.tolist() for key, sums in self._sums.items()}
        total: dict[tuple[str, str], list[float]] = {}
        for one in gather(mine, self._grid.world):
            for key, sums in one.items():
                so_far = total.get(key, [0.0] * NUMBERS)
                total[key] = [a + b for a, b in zip(so_far, sums, strict=True)]
        passes: dict[str, dict[str, list[float]]] = {}
        for name in PASSES:
            numbers = {place: [value] for (of, place), value in self._numbers.items() if of == name}
            places = sorted((place for of, place in total if of == name), key=model_order)
            if name in ("backward", "gradients"):
                places.reverse()
            tensors = {place: total[name, place] for place in places}
            # Rate and clipping come before the weights that they make, a loss after all outputs.
            found = numbers | tensors if name == "update" else tensors | numbers
            if found:
                passes[name] = found
        return passes

    # --- How -------------------------------------------------------------------------------------

    def _data(self) -> None:
        grid = self._grid
        if max(grid.tp.rank, grid.cp.rank, grid.pp.rank) > 0:
            return
        for batch in self._batches:
            ids = torch.from_numpy(batch.sample_ids)
            index = ids.unsqueeze(1) * batch.tokens.shape[1] + torch.arange(batch.tokens.shape[1])
            self._add("data", "tokens", torch.from_numpy(batch.tokens), index)
            self._add("data", "labels", torch.from_numpy(batch.labels), index)
            for name in ("documents", "positions"):
                if (values := getattr(batch, name)) is not None:
                    self._add("data", name, torch.from_numpy(values), index)

    def _hook(self, place: str) -> Callable[[nn.Module, Any, Tensor], None]:
        @torch.compiler.disable  # it is called by a layer, and layers are compiled
        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._action is None or self._action.kind is not Kind.F:
                return  # recomputed in a backward: it was seen before
            number = self._action.microbatch
            self._hidden("forward", place, number, output)
            if output.requires_grad:
                output.register_hook(
                    lambda gradient: self._hidden("backward", place, number, gradient)
                )

        return look

    def _hidden(self, name: str, place: str, number: int, x: Tensor) -> None:
        """Digest hidden states of a microbatch, (s, b, h) or this rank's share of s."""
        grid = self._grid
        is_share = self._engine.config.parallel.sequence_parallel
        if grid.tp.rank > 0 and not is_share:
            return
        batch = self._batches[number]
        length = batch.tokens.shape[1]
        positions = tokens_of(zigzag.spans(length, grid.cp.size, grid.cp.rank), x.device)
        if is_share:
            positions = positions.chunk(grid.tp.size)[grid.tp.rank]
        ids = torch.from_numpy(batch.sample_ids).to(x.device)
        first = (ids * length + positions.unsqueeze(1)) * x.shape[2]
        channels = torch.arange(x.shape[2], device=x.device)
        self._add(name, place, x.detach(), first, channels)

    def _parameters(
        self,
        name: str,
        shards: Sequence[ParameterShard],
        tensor_of: Callable[[ParameterShard], Tensor | None],
    ) -> None:
        for shard in shards:
            values = tensor_of(shard)
            if values is None:
                continue
            for piece, rows in shard.boxes:
                if piece.is_counted_here:
                    self._box(name, piece, values.detach()[rows])

    def _box(self, name: str, piece: Piece, values: Tensor) -> None:
        """Digest a box of a global tensor."""
        strides = [1]
        for extent in reversed(piece.shape[1:]):
            strides.insert(0, strides[0] * extent)
        places = zip(piece.box.offsets, piece.box.sizes, strides, strict=True)
        along = [
            torch.arange(offset, offset + size, device=values.device) * stride
            for offset, size, stride in places
        ]
        self._add(name, piece.name, values, *along)

    def _add(self, name: str, place: str, values: Tensor, *along: Tensor) -> None:
        """Add `values` to a digest.

        Args:
            along: what makes the global index: one tensor of indices of leading dims, then one for
                each dim that is left; they add up.
        """
        sums = self._sums.setdefault((name, place), torch.zeros(NUMBERS, dtype=torch.float64))
        first, *rest = along
        lead = values.reshape(first.numel(), -1)
        for index in rest:
            first = first.unsqueeze(-1) + index
        index = first.reshape(lead.shape)
        scale = self._loss_scale if name in ("backward", "gradients") else 1.0
        rows = max(1, _ELEMENTS_AT_ONCE // max(1, lead.shape[1]))
        for chunk, numbers in zip(lead.split(rows), index.split(rows), strict=True):
            x = chunk.double() / scale
            sums += _sums(x, numbers).cpu()


def _places(stage: nn.Module, compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a stage that put out hidden states, by what they are called in digests. What
    is inside a compiled layer is nowhere to be seen."""
    if stage.share.is_first:
        yield "embedding", stage.embedding
    for number, layer in stage.layers.items():
        if not compiled:
            yield f"layers.{number}.attention", layer.attention
            yield f"layers.{number}.mlp", layer.mlp
        yield f"layers.{number}.output", layer
    if stage.share.is_last:
        yield "norm", stage.norm


def _sums(values: Tensor, index: Tensor) -> Tensor:
    """The digest of `values`, whose elements have the global numbers `index`."""
    x = values.double()
    bits = hashing.bits(_SIGNS, index)
    signed = [(x * (1 - 2 * ((bits >> k) & 1))).sum() for k in range(PROJECTIONS)]
    count = torch.tensor(x.numel(), dtype=torch.float64, device=x.device)
    return torch.stack([count, x.sum(), x.square().sum(), *signed])
