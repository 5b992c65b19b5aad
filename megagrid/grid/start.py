"""From a config and a launcher's word to a running grid."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megagrid.config.rules import check
from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.errors import GridError
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Grid, build_grid
from megagrid.grid.placement import Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster
from megagrid.pipeline.program import training_schedule

SECONDS_BEHIND = 30.0
"""That a backend's own time-out comes after `train.timeout_seconds`, for ranks that can't tell."""


@contextmanager
def running_grid(config: Config, environment: RankEnvironment) -> Iterator[Grid]:
    """Join the run's process group, build the grid, and leave the group at the end.

    Raises:
        GridError: if the ranks don't fill the grid, a tp group crosses nodes, or the nodes leave
            open how many ranks shard together.
        ScheduleError, ConfigError: if the pipeline's schedule can't be had or isn't for this grid.
    """
    parallel = config.parallel
    placement = Placement.for_world(
        environment.world_size,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        cp=parallel.context_parallel_size,
        dp=parallel.data_parallel_size,
    )
    device = select_device(config.train.device, environment.local_rank)
    _join(environment, device, _timeout(config))
    try:
        cluster = _cluster(environment, device)
        if not parallel.allow_tp_across_nodes:
            check_tp_inside_nodes(placement, cluster)
        if leaves_shard_size_to_nodes(config):
            config = with_shard_size(config, placement.shard_size_in_nodes(cluster))
            check(config, placement.world_size)
        yield grid_of(config, placement, environment.rank, device)
    finally:
        dist.destroy_process_group()


def leaves_shard_size_to_nodes(config: Config) -> bool:
    """Whether HYBRID_SHARD is to split inside nodes, whatever their size."""
    parallel = config.parallel
    return parallel.sharding_strategy == "HYBRID_SHARD" and parallel.shard_size is None


def with_shard_size(config: Config, shard_size: int) -> Config:
    """`config` with that `parallel.shard_size`, if it leaves it to the nodes."""
    if not leaves_shard_size_to_nodes(config):
        return config
    parallel = config.parallel.model_copy(update={"shard_size": shard_size})
    return config.model_copy(update={"parallel": parallel})


def grid_of(
    config: Config,
    placement: Placement,
    rank: int,
    device: torch.device | str,
    *,
    has_groups: bool = True,
    host_backend: str = "gloo",
) -> Grid:
    """The grid that the recipe asks for, as `rank` sees it; see `build_grid`."""
    stages = training_schedule(config, placement).placement
    sharding = Sharding.of(config, placement)
    after = sharding.after_forward
    return build_grid(
        placement,
        rank,
        device,
        config.model.num_kv_heads,
        ends=(stages[0], stages[-1]),
        shard_size=sharding.split if config.parallel.shard_size is not None else None,
        reshard_size=None if isinstance(after, bool) else after,
        has_groups=has_groups,
        host_backend=host_backend,
        timeout=_timeout(config),
    )


def _timeout(config: Config) -> timedelta:
    """Of a collective before the first step. The rank's heart gives up sooner, and says why."""
    train = config.train
    seconds = max(train.timeout_seconds, train.setup_timeout_seconds)
    return timedelta(seconds=seconds + SECONDS_BEHIND)


def expect_steps(config: Config, grid: Grid) -> None:
    """From now on collectives of `grid` wait no longer than a step may."""
    timeout = timedelta(seconds=config.train.timeout_seconds + SECONDS_BEHIND)
    groups = {id(axis.group): axis.group for axis in grid.axes.values() if axis.group is not None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        for group in groups.values():
            _set_pg_timeout(timeout, group)


def select_device(name: str, local_rank: int) -> torch.device:
    """This rank's device: `name` is "auto", "cpu", or an accelerator's type as torch calls it.

    Raises:
        GridError: it isn't there.
    """
    kind = check_devices(name, local_rank + 1)
    if kind == "cpu":
        return torch.device(kind)
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def check_devices(name: str, ranks: int) -> str:
    """The type of the device that each of `ranks` on this machine has to itself; see
    `select_device`.

    Raises:
        GridError: there are none, or fewer.
    """
    accelerator = torch.accelerator.current_accelerator()
    available = accelerator.type if accelerator is not None else "cpu"
    wanted = available if name == "auto" else name
    if wanted == "cpu":
        return wanted
    if wanted != available:
        raise GridError(f'train.device="{name}" isn\'t here; this machine has "{available}"')
    count = torch.accelerator.device_count()
    if ranks > count:
        raise GridError(
            f"local rank {ranks - 1} has no device: {count} of type {wanted} here; start "
            f"{count} ranks per node"
        )
    return wanted


def _join(environment: RankEnvironment, device: torch.device, timeout: timedelta) -> None:
    backend = dist.get_default_backend_for_device(device)
    if environment.master_address is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        backend,
        init_method=f"tcp://{environment.master_address}:{environment.master_port}",
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )


def _cluster(environment: RankEnvironment, device: torch.device) -> Cluster:
    """Each rank's node, told by each rank: nodes needn't have equally many."""
    nodes = torch.zeros(environment.world_size, dtype=torch.int64, device=device)
    nodes[environment.rank] = environment.node
    dist.all_reduce(nodes)
    return Cluster(tuple(nodes.tolist()))
