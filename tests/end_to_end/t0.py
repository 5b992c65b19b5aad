"""T0, the run that these tests bend: a tiny Llama, 8 steps of 8 samples, on ranks of the pool."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megagrid import checkpoint
from megagrid.checkpoint.manifest import read_manifest
from megagrid.config.rules import check
from megagrid.config.rules import placement as placement_of
from megagrid.config.schema import Config
from megagrid.errors import MegagridError
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of
from megagrid.nn.layout import Box
from megagrid.train import attempt as attempt_module
from megagrid.train.metrics import StepRecord, read_records
from megagrid.train.run import Run
from tests.ranks import Ranks

Sections = Mapping[str, Mapping[str, Any]]
"""Parts of a recipe: {"model": {"tied_embeddings": True}}."""

SAVED_AT = 4
"""Half-way: where runs that are resumed have been saved."""

ALONE = Placement()
TP2, PP2, DP2 = Placement(tp=2), Placement(pp=2), Placement(dp=2)
TP2PP2, TP2DP2, PP2DP2 = Placement(tp=2, pp=2), Placement(tp=2, dp=2), Placement(pp=2, dp=2)
TP4, PP4, DP4 = Placement(tp=4), Placement(pp=4), Placement(dp=4)
ALL_AXES = Placement(tp=2, pp=2, dp=2)

SP = {"parallel": {"sequence_parallel": True}}
TIED = {"model": {"tied_embeddings": True}}
GPT = {"model": {"family": "gpt", "num_kv_heads": 8}}
DROPOUT = {"model": {"dropout": 0.1, "attention_dropout": 0.1}}
BF16, FP64 = {"train": {"precision": "bf16"}}, {"train": {"precision": "fp64"}}
HALF_WAY = {"checkpoint": {"save_interval": SAVED_AT}}


def strategy(name: str) -> Sections:
    return {"parallel": {"sharding_strategy": name}}


def schedule(name: str, chunks: int = 1) -> Sections:
    return {"parallel": {"pipeline_schedule": name, "virtual_pipeline_size": chunks}}


def layers_per_stage(*layers: int) -> Sections:
    return {"parallel": {"layers_per_stage": list(layers)}}


GPIPE, ZB1P = schedule("GPipe"), schedule("ZB1P")
INTERLEAVED, ZBV = schedule("Interleaved1F1B", 2), schedule("ZBV", 2)


def merged(*parts: Sections) -> dict[str, dict[str, Any]]:
    """Sections with the keys of all `parts`; later ones win."""
    whole: dict[str, dict[str, Any]] = {}
    for part in parts:
        for section, keys in part.items():
            whole[section] = whole.get(section, {}) | keys
    return whole


def t0(run_dir: Path | str, placement: Placement = ALONE, *parts: Sections) -> Config:
    """T0 on a grid, with the keys of `parts` in place of its own.

    Initial weights are about 1 / sqrt(hidden size): ten times smaller, attention would be all but
    uniform, and little of what may go wrong in it would show in a loss.
    """
    recipe = {
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 4,
            "vocab_size": 61,
            "max_seq_length": 32,
            "make_vocab_size_divisible_by": 1,
            "init_std": 0.15,
        },
        "parallel": {
            "tensor_parallel_size": placement.tp,
            "pipeline_parallel_size": placement.pp,
            "context_parallel_size": placement.cp,
            "data_parallel_size": placement.dp,
        },
        "train": {
            "seq_length": 32,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "steps": 8,
            "device": "cpu",
        },
        "optimizer": {"lr": 1e-3, "clip_grad": 1.0},
        "data": {"paths": ["synthetic"], "valid_fraction": 0.0},
        "logging": {"run_dir": str(run_dir)},
    }
    config = Config(**merged(recipe, *parts))
    check(config, placement.world_size)
    return config


def name_of(placement: Placement) -> str:
    """A grid in a test's name: tp2pp2."""
    sizes = {axis: placement.size(axis) for axis in ("tp", "pp", "dp", "cp")}
    return "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "alone"


# ------------------------------------------------------------------------------------------------
# On the ranks

Work = Callable[[Run], Any]
"""What a rank does with the run it has built."""


@dataclass(frozen=True)
class RankReport:
    """What one rank says of a run.

    Attributes:
        output: what it printed.
        error: the mistake that ended it, as "CheckpointError: message"; None if it went well.
        result: of the work.
    """

    output: str
    error: str | None = None
    result: Any = None


def work_on_rank(config: Config, work: Work) -> RankReport:
    """Build the run on this rank of the pool, and do `work` with it."""
    placement = placement_of(config, dist.get_world_size())
    grid = grid_of(config, placement, dist.get_rank(), "cpu")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            result = work(Run(config, grid))
        except MegagridError as error:
            return RankReport(output.getvalue(), f"{type(error).__name__}: {error}")
    return RankReport(output.getvalue(), result=result)


def run_and_note_samples(run: Run) -> list[list[int]]:
    """Train; the numbers of the samples that this rank computed in each step."""
    seen: list[list[int]] = []

    def noting(engine, batches, *rest: Any, **more: Any):
        seen.append([sample for batch in batches for sample in batch.sample_ids.tolist()])
        return compute_gradients(engine, batches, *rest, **more)

    compute_gradients = attempt_module.compute_gradients
    with patch.object(attempt_module, "compute_gradients", noting):
        run.run()
    return seen


# ------------------------------------------------------------------------------------------------
# On the test's side


@dataclass(frozen=True)
class Training:
    """A run, and what has become of it."""

    config: Config
    ranks: Sequence[RankReport]

    @property
    def folder(self) -> Path:
        return Path(self.config.logging.run_dir)

    @cached_property
    def records(self) -> list[StepRecord]:
        return read_records(self.folder / "metrics.jsonl")

    @property
    def has_begun(self) -> bool:
        return has_begun(self.folder)

    @property
    def errors(self) -> set[str | None]:
        """The mistake that ended each rank."""
        return {report.error for report in self.ranks}

    @property
    def saved_steps(self) -> list[int]:
        """Steps of its checkpoints, in order."""
        return [folder.step for folder in reversed(checkpoint.newest_first(self._checkpoints))]

    def checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:08}"

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Weights and moments of a checkpoint, whole."""
        return read_tensors(self.checkpoint(step))

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"


class Trainer:
    """Trains T0 and its variants, each in a folder of its own."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._runs = 0
        self._references: dict[str, Training] = {}

    def attempt(
        self, placement: Placement = ALONE, *parts: Sections, work: Work = Run.run
    ) -> Training:
        """Train; a user's mistake is reported, any other fault is raised."""
        self._runs += 1
        config = t0(self._folder / f"run{self._runs}", placement, *parts)
        world_size = placement.world_size
        return Training(config, self._ranks.run(work_on_rank, config, work, world_size=world_size))

    def train(
        self, placement: Placement = ALONE, *parts: Sections, work: Work = Run.run
    ) -> Training:
        """Train to the end."""
        training = self.attempt(placement, *parts, work=work)
        assert training.errors == {None}
        return training

    def resume(
        self,
        former: Training,
        placement: Placement,
        *parts: Sections,
        step: int = SAVED_AT,
        work: Work = Run.run,
    ) -> Training:
        """Go on from a checkpoint of `former`, in another folder."""
        resume = {"checkpoint": {"resume": str(former.checkpoint(step))}}
        return self.train(placement, *parts, resume, work=work)

    def reference(self, *parts: Sections) -> Training:
        """REF: the same on one process, saved half-way and at the end."""
        key = str(merged(*parts))
        if key not in self._references:
            self._references[key] = self.train(ALONE, *parts, HALF_WAY)
        return self._references[key]


def has_begun(run: Path) -> bool:
    """Whether the folder of a run has more than the lock of one that was refused."""
    return any((run / name).exists() for name in ("config.toml", "metrics.jsonl", "checkpoints"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by its name."""
    entries = [
        checkpoint.Entry(
            name,
            saved.shape,
            Box((0,) * len(saved.shape), saved.shape),
            torch.empty(saved.shape, dtype=getattr(torch, saved.dtype)),
            is_written_here=False,
        )
        for name, saved in read_manifest(path).tensors.items()
    ]
    checkpoint.load(path, entries)
    return {entry.name: entry.tensor for entry in entries}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that aren't bit by bit the same, or are on one side only."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


def computed(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """What records say, without what a clock or the machine has measured."""
    names = "step loss grad_norm lr valid_tokens consumed_tokens consumed_samples sample_ids"
    return [
        {name: getattr(record, name) for name in (*names.split(), "valid_loss")}
        for record in records
    ]


def assert_parity(
    found: Sequence[StepRecord],
    reference: Sequence[StepRecord],
    *,
    loss: float = 1e-5,
    grad_norm: float = 1e-4,
) -> None:
    """Each step of `found` is that step of `reference`: |Δloss| <= `loss`, norms within
    `grad_norm` of each other, relatively."""
    expected = {record.step: record for record in reference}
    for record in found:
        other = expected[record.step]
        step = f"step {record.step}"
        assert abs(record.loss - other.loss) <= loss, f"{step}: {record.loss} {other.loss}"
        assert abs(record.grad_norm / other.grad_norm - 1) <= grad_norm, (
            f"{step}: norm {record.grad_norm} {other.grad_norm}"
        )
        assert (record.lr, record.sample_ids) == (other.lr, other.sample_ids), step
