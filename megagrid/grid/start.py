"""From a config and a launcher's word to a running grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megagrid.config.schema import Config
from megagrid.errors import GridError
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Grid, build_grid
from megagrid.grid.placement import Placement, check_tp_inside_nodes
from megagrid.grid.topology import Cluster
from megagrid.pipeline.program import training_schedule


@contextmanager
def running_grid(config: Config, environment: RankEnvironment) -> Iterator[Grid]:
    """Join the run's process group, build the grid, and leave the group at the end.

    Raises:
        GridError: if the ranks don't fill the grid, or a tp group crosses nodes.
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
    _join(environment, device, config.train.timeout_seconds)
    try:
        if not parallel.allow_tp_across_nodes:
            check_tp_inside_nodes(placement, _cluster(environment, device))
        stages = training_schedule(config, placement).placement
        yield build_grid(
            placement,
            environment.rank,
            device,
            config.model.num_kv_heads,
            ends=(stages[0], stages[-1]),
        )
    finally:
        dist.destroy_process_group()


def select_device(name: str, local_rank: int) -> torch.device:
    """This rank's device: `name` is "auto", "cpu", or an accelerator's type as torch calls it."""
    accelerator = torch.accelerator.current_accelerator()
    available = accelerator.type if accelerator is not None else "cpu"
    wanted = available if name == "auto" else name
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != available:
        raise GridError(f'train.device="{name}" isn\'t here; this machine has "{available}"')
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise GridError(
            f"local rank {local_rank} has no device: {count} of type {wanted} here; start "
            f"{count} ranks per node"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(wanted, local_rank)


def _join(environment: RankEnvironment, device: torch.device, timeout_seconds: float) -> None:
    backend = dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=timeout_seconds)
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
