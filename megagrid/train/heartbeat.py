"""The heart of a rank that trains: who it beats for, and what it watches. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megagrid.config.rules import placement
from megagrid.config.schema import Config
from megagrid.grid import bootstrap
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.health.heart import Heart, Identity, Pulse
from megagrid.health.stragglers import Lookout
from megagrid.health.watch import Watch

BEATS_IN_TIMEOUT = 10
"""Beats while a rank waits for as long as it may: enough to tell silence from a late one."""


def identify(config: Config, environment: RankEnvironment, start: str | None = None) -> Identity:
    """Who a rank is, by the number that it has in `environment`, and of which start of the run."""
    grid = placement(config, environment.world_size)
    return Identity(
        rank=environment.rank,
        world_size=environment.world_size,
        coordinate=grid.coordinate(environment.rank),
        host=environment.host,
        job=bootstrap.read_job(),
        start=start,
    )


def make_heart(config: Config, environment: RankEnvironment) -> Heart:
    """A heart that doesn't beat yet."""
    run, train = Path(config.logging.run_dir), config.train
    watch = Watch(run, train.timeout_seconds, train.setup_timeout_seconds)
    interval = min(config.logging.beat_seconds, train.timeout_seconds / BEATS_IN_TIMEOUT)
    lookout = Lookout(run, config.logging.straggler_factor, _say)
    return Heart(run, identify(config, environment), interval, Pulse(), watch, lookout)


def _say(text: str) -> None:
    print(text, flush=True)
