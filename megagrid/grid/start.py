"""From a config and a launcher's word to a running grid."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megagrid.config.rules import check
from megagrid.config.rules import placement as placement_of
from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.errors import GridError
from megagrid.grid import bootstrap, network
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Grid, build_grid
from megagrid.grid.placement import Placement, check_tp_inside_nodes
from megagrid.grid.rendezvous import Patience, Word, forget, meet, store_of, told_by_one
from megagrid.grid.topology import Cluster, Node, load_topology, numbered, switches_of
from megagrid.pipeline.program import training_schedule

SECONDS_BEHIND = 30.0
"""That a backend's own time-out comes after `train.timeout_seconds`, for ranks that can't tell."""


@dataclass(frozen=True)
class Meeting:
    """What the ranks know of each other once they have met.

    Attributes:
        environment: this rank's, with the number that it has from now on.
        start: names this start of the run: all its ranks know it, and no other start has it.
        store: theirs, for as long as the run lasts.
        cluster: where each rank is.
        device: where this one computes.
        launcher_ranks: the number that each rank had from its launcher.
    """

    environment: RankEnvironment
    start: str
    store: dist.Store
    cluster: Cluster
    device: torch.device
    launcher_ranks: tuple[int, ...]

    @property
    def is_reordered(self) -> bool:
        return self.launcher_ranks != tuple(range(len(self.launcher_ranks)))


def renumbering(met: Meeting) -> str:
    """What to tell of ranks that have other numbers than their launcher gave them."""
    former = met.launcher_ranks
    shown = " ".join(map(str, former[:16])) + (" …" if len(former) > 16 else "")
    return (
        f"ranks are renumbered, so that those of a node and a switch are neighbours: 0 to "
        f"{len(former) - 1} are the launcher's {shown}"
    )


@contextmanager
def meeting(config: Config, environment: RankEnvironment) -> Iterator[Meeting]:
    """Meet the other ranks, and number them as the recipe has it.

    Raises:
        GridError: not all came, they disagree on how many there are, one has no device of its own,
            the cluster's switches can't be read, or hosts can't reach each other.
    """
    kind, patience = device_kind(config.train.device), _patience(config)
    folder = Path(config.logging.run_dir)
    word = _word(environment, kind)
    with store_of(environment, folder, patience) as whole_store:
        try:
            store, seen = meet(whole_store, environment, word, partial(_conclude, config), patience)
        finally:
            forget(environment, folder)
        if environment.world_size > 1:
            talk = _Talk(dist.PrefixStore("network", store), environment, patience)
            stated = bootstrap.stated_interfaces(talks_nccl=kind != "cpu")
            place = environment.rank, environment.host, whole_store.host
            bootstrap.use_interface(network.agree(talk, *place, stated))
        order = tuple(seen["order"])
        rank = order.index(environment.rank)
        nodes = (Node(name, tuple(switches), number) for name, switches, number in seen["nodes"])
        met = Meeting(
            environment=replace(environment, rank=rank),
            start=seen["start"],
            store=store,
            cluster=Cluster(tuple(seen["node_of_rank"]), tuple(nodes)),
            device=take_device(kind, seen["device_of_rank"][rank]),
            launcher_ranks=order,
        )
        with told_by_one(store):
            yield met


class _Talk:
    """Says a word to all ranks, and hears what rank 0 concludes; see `megagrid.grid.network`."""

    def __init__(self, store: dist.Store, environment: RankEnvironment, patience: Patience) -> None:
        self._store = store
        self._environment = environment
        self._patience = patience

    def __call__(self, word: Word, conclude: Callable[[list[Word]], Word]) -> Word:
        who, patience = self._environment, self._patience
        # What is said next has a place of its own in the store.
        self._store, result = meet(self._store, who, word, conclude, patience)
        return result


def _word(environment: RankEnvironment, kind: str) -> Word:
    """What a rank says of itself."""
    return {
        "world_size": environment.world_size,
        "host": environment.host,
        "node": environment.node,
        "switches": environment.switches,
        "local_rank": environment.local_rank,
        "devices": _devices(kind),
        "visible": _visible(kind, environment),
    }


def _conclude(config: Config, words: Sequence[Word]) -> Word:
    """Where everybody is and computes, in the order that ranks are numbered in, for all to hear.

    Raises:
        GridError: see `meeting`.
    """
    sizes = sorted({word["world_size"] for word in words})
    if len(sizes) > 1:
        raise GridError(f"ranks disagree on how many they are: {sizes}; start them by one launcher")
    switches = _switches(config.parallel.topology_file, words)
    nodes = [
        Node(word["host"], way, word["node"]) for word, way in zip(words, switches, strict=True)
    ]
    order, cluster = numbered(nodes, config.parallel.rank_order)
    devices = device_of_rank(words)
    return {
        "start": secrets.token_hex(4),
        "order": order,
        "nodes": [(node.name, node.switches, node.number) for node in cluster.nodes],
        "node_of_rank": cluster.node_of_rank,
        "device_of_rank": [devices[rank] for rank in order],
    }


def _switches(topology_file: str | None, words: Sequence[Word]) -> list[tuple[str, ...]]:
    """Those of each rank's node, outermost first."""
    if topology_file is None:
        return [tuple(word["switches"]) for word in words]
    topology = load_topology(topology_file)
    return [switches_of(word["host"], topology, topology_file) for word in words]


def device_of_rank(words: Sequence[Word]) -> list[int]:
    """The index of each rank's device among those that it sees.

    Ranks of a node that see the same devices take them in turn; one that sees devices of its own,
    as SLURM's --gpus-per-task has it, takes the first.

    Raises:
        GridError: there are more such ranks than devices.
    """
    sharing: dict[tuple[str, int, str], list[int]] = {}
    for rank in sorted(range(len(words)), key=lambda rank: words[rank]["local_rank"]):
        word = words[rank]
        sharing.setdefault((word["host"], word["node"], word["visible"]), []).append(rank)
    found = [0] * len(words)
    for (host, _, _), ranks in sharing.items():
        devices = words[ranks[0]]["devices"]
        if devices is not None and len(ranks) > devices:
            raise GridError(
                f"{len(ranks)} ranks on {host} see the same {devices} devices, so that rank "
                f"{ranks[devices]} has none; start {devices} ranks per node, or give each task its "
                "own, as by srun --gpus-per-task=1"
            )
        for index, rank in enumerate(ranks):
            found[rank] = index
    return found


@contextmanager
def running_grid(config: Config, met: Meeting) -> Iterator[Grid]:
    """Join the run's process group, build the grid, and leave the group at the end.

    Raises:
        GridError: if the ranks don't fill the grid, a tp group crosses nodes, or the nodes leave
            open how many ranks shard together.
        ScheduleError, ConfigError: if the pipeline's schedule can't be had or isn't for this grid.
    """
    parallel = config.parallel
    placement = placement_of(config, met.cluster.world_size)
    if not parallel.allow_tp_across_nodes:
        check_tp_inside_nodes(placement, met.cluster)
    if leaves_shard_size_to_nodes(config):
        config = with_shard_size(config, placement.shard_size_in_nodes(met.cluster))
        check(config, placement.world_size)
    _join(met, _timeout(config))
    try:
        yield grid_of(config, placement, met.environment.rank, met.device)
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
    return timedelta(seconds=_patience(config).seconds + SECONDS_BEHIND)


def _patience(config: Config) -> Patience:
    """Before the first step."""
    keys = ("setup_timeout_seconds", "timeout_seconds")
    limits = (Patience(getattr(config.train, key), f"train.{key}") for key in keys)
    return max(limits, key=lambda limit: limit.seconds)


def expect_steps(config: Config, grid: Grid) -> None:
    """From now on collectives of `grid` wait no longer than a step may."""
    timeout = timedelta(seconds=config.train.timeout_seconds + SECONDS_BEHIND)
    groups = {id(axis.group): axis.group for axis in grid.axes.values() if axis.group is not None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        for group in groups.values():
            _set_pg_timeout(timeout, group)


def device_kind(name: str) -> str:
    """The type of device that `name` stands for: "auto", "cpu", or an accelerator's type as torch
    calls it.

    Raises:
        GridError: it isn't here.
    """
    accelerator = torch.accelerator.current_accelerator()
    available = accelerator.type if accelerator is not None else "cpu"
    wanted = available if name == "auto" else name
    if wanted not in ("cpu", available):
        raise GridError(f'train.device="{name}" isn\'t here; this machine has "{available}"')
    return wanted


def check_devices(name: str, ranks: int) -> None:
    """See to it that each of `ranks` on this machine can have a device to itself.

    Raises:
        GridError: there are none, or fewer.
    """
    kind = device_kind(name)
    count = _devices(kind)
    if count is not None and ranks > count:
        raise GridError(
            f"local rank {ranks - 1} has no device: {count} of type {kind} here; start "
            f"{count} ranks per node"
        )


def _devices(kind: str) -> int | None:
    """How many devices this process sees; None where ranks share one, the CPU."""
    return None if kind == "cpu" else torch.accelerator.device_count()


def _visible(kind: str, environment: RankEnvironment) -> str:
    """Which they are: the same of two ranks only if they see the same ones.

    What the environment says isn't enough. Where the system shows each process its own devices
    alone, all of them may call theirs 0.
    """
    if kind == "cpu":
        return kind
    module = torch.get_device_module(kind)
    properties = [module.get_device_properties(index) for index in range(_devices(kind) or 0)]
    names = [str(getattr(one, "uuid", one.name)) for one in properties]
    return " ".join([*environment.visible_devices, *names])


def take_device(kind: str, index: int) -> torch.device:
    """The device of that type and index, from now on this process's own."""
    if kind == "cpu":
        return torch.device(kind)
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def _join(met: Meeting, timeout: timedelta) -> None:
    dist.init_process_group(
        dist.get_default_backend_for_device(met.device),
        store=met.store,
        rank=met.environment.rank,
        world_size=met.environment.world_size,
        timeout=timeout,
    )
