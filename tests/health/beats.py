"""Beats made up for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrid.grid.placement import Placement
from megagrid.health.beat import COMPUTING, TRAINING, WAITING, Beat, Doing

NOW = 1_000_000.0

GRID = Placement(tp=2, pp=2)


def beat(rank: int, grid: Placement = GRID, **keys: Any) -> Beat:
    """A rank that computes in a step, seen just now."""
    made = Beat(
        rank=rank,
        world_size=grid.world_size,
        coordinate=grid.coordinate(rank),
        host=f"node{rank // 2}",
        pid=100 + rank,
        device="cpu",
        started=NOW - 3600,
        time=NOW - 1,
        interval_s=2.0,
        step=7,
        phase=TRAINING,
        phase_since=NOW - 3000,
        doing=Doing(COMPUTING, "Linear.forward", "nn/linear.py:88", NOW - 1),
    )
    return replace(made, **keys)


def waiting(what: str, axis: str, *peers: int, since: float = NOW - 60) -> Doing:
    """In a collective."""
    return Doing(WAITING, what, "comm/collectives.py:24", since, axis, peers)
