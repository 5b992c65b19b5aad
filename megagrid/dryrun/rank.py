"""A rank's step on fake tensors: the engine that a run builds, and the step that it makes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from megagrid.config.schema import Config
from megagrid.data import Batch
from megagrid.data_parallel.sharding import shards_are_final
from megagrid.dryrun.fake import ReadsZero, fake_grid
from megagrid.dryrun.measure import Measurement, measure
from megagrid.grid.placement import Placement
from megagrid.pipeline.program import microbatches
from megagrid.train.build import build_engine


@dataclass(frozen=True)
class DryRun:
    """What a step of a rank would take.

    Attributes:
        rank: its number.
        found: what was measured.
        seconds: that it took to find out.
    """

    rank: int
    found: Measurement
    seconds: float


def dry_run(config: Config, placement: Placement, rank: int, device: str = "cpu") -> DryRun:
    """Build the engine of `rank` on fake tensors and measure a step of it.

    Raises:
        ScheduleError, ConfigError: if the pipeline's schedule can't be had or isn't for this grid.
    """
    start = time.perf_counter()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_grid(config, placement, rank, device) as grid:
        engine = build_engine(config, grid, fakes)
        for stage in engine.executor.stages.values():
            shards_are_final(stage.module)
        with fakes, ReadsZero():
            found = measure(engine, batches_of_zeros(config, placement))
    return DryRun(rank, found, time.perf_counter() - start)


def batches_of_zeros(config: Config, placement: Placement) -> list[Batch]:
    """The microbatches of a step, all of the same token: only their shapes matter."""
    train = config.train
    shape = (train.micro_batch_size, train.seq_length)

    def zeros(*sizes: int) -> np.ndarray:
        return np.zeros(sizes, dtype=np.int64)

    batch = Batch(
        zeros(*shape),
        zeros(*shape),
        zeros(train.micro_batch_size),
        zeros(*shape) if config.data.document_mask else None,
        zeros(*shape) if config.data.resets_positions else None,
    )
    return [batch] * microbatches(config, placement)
