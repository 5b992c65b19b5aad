"""The grid that a recipe asks for."""

from __future__ import annotations

from megagrid.config.dump import toml_value
from megagrid.config.schema import Config
from megagrid.errors import ConfigError, GridError
from megagrid.grid.placement import Placement


def topology_file_orders_ranks(config: Config) -> None:
    """Nothing else reads it."""
    parallel = config.parallel
    if parallel.topology_file is not None and parallel.rank_order == "launcher":
        raise ConfigError(
            f"parallel.topology_file={toml_value(parallel.topology_file)} isn't read under "
            'parallel.rank_order="launcher"; clear it with none, or choose "topology"'
        )


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
    fewest, stated = parallel.min_data_parallel_size, parallel.data_parallel_size
    if fewest is None:
        return Placement.for_world(world_size, tp=tp, pp=pp, cp=cp, dp=stated)
    found = Placement.for_world(world_size, tp=tp, pp=pp, cp=cp, dp=None)
    if not fewest <= found.dp <= (stated or found.dp):
        most = f" and parallel.data_parallel_size={stated}" if stated else ""
        raise GridError(
            f"{world_size} ranks leave {found.dp} for the dp axis, which isn't within "
            f"parallel.min_data_parallel_size={fewest}{most}; start another number of ranks, or "
            "change the sizes"
        )
    return found


def fewest_ranks_are_no_more_than_all(config: Config) -> None:
    """A dp axis can't have more ranks at least than it has."""
    fewest, dp = config.parallel.min_data_parallel_size, config.parallel.data_parallel_size
    if fewest is not None and dp is not None and fewest > dp:
        raise ConfigError(
            f"parallel.min_data_parallel_size={fewest} is more than parallel.data_parallel_size="
            f"{dp}; set it to {dp} or less"
        )
