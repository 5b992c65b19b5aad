"""The grid that a recipe asks for."""

from __future__ import annotations

from megagrid.config.schema import Config
from megagrid.grid.placement import Placement


def placement(config: Config, world_size: int | None = None) -> Placement:
    """The grid of the run.

    Args:
        world_size: ranks that there are; None: as few as the recipe allows, dp 1 unless stated.

    Raises:
        GridError: the stated sizes don't make `world_size` ranks.
    """
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
    )
    if world_size is None:
        return Placement(tp=tp, pp=pp, cp=cp, dp=parallel.data_parallel_size or 1)
    return Placement.for_world(world_size, tp=tp, pp=pp, cp=cp, dp=parallel.data_parallel_size)
