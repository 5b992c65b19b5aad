"""fully_shard over the ranks with the same parameters: which units, over which of those ranks, when
they are gathered, and when gradients are reduced.

Layers, one by one or some at a time, are units of a stage; so may be its embedding and its head;
what is left of it (last norm, and those two) is one more. A unit's parameters are gathered before
it computes and its gradients reduced after it. The tp and pp axes hold different parameters, so a
unit never spans them.

What is split over which ranks, and how long it stays gathered, is the table of
`megagrid.config.sharding`. fully_shard is given a mesh (replicas, split), either of which may be 1:

    FULL_SHARD, SHARD_GRAD_OP  (1, d)     HYBRID_SHARD  (d / s, s)     ZERO1, NO_SHARD  (d, 1)

Modules kept out of sharding are (d, 1) within a unit of the others. Under ZERO1 the optimizer
updates some rows of each parameter, which then are gathered from all ranks.

Gradients are summed, not averaged (the loss is already divided by the tokens of the whole grid),
and once a step: in each stage's last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megagrid.comm.collectives import all_gather
from megagrid.config.modules import is_unsharded
from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.grid import Axis, Grid
from megagrid.model.decoder import DecoderStage
from megagrid.nn.layout import ParameterShard, Sharing, first_of_shard, local

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
MASTER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "fp64": torch.float64,
}


# --- Who has what --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A recipe's sharding on the axes of a grid.

    Attributes:
        everyone: the ranks with the same parameters.
        split, replicas: of those, the ranks that split a parameter, and those with the same rows.
        reshard: the ranks that split gathered parameters between a forward and its backward.
        states: the ranks that split the optimizer's states.
    """

    config: Config
    sharding: Sharding
    everyone: Axis
    split: Axis
    replicas: Axis
    reshard: Axis
    states: Axis

    @classmethod
    def of(cls, config: Config, grid: Grid) -> Spread:
        """Raises:
        AssertionError: the grid was built for another recipe.
        """
        sharding = Sharding.of(config, grid.placement)
        everyone, alone = grid.dp_cp, Axis.single("dp_shard", grid.rank)
        if sharding.split == sharding.ranks:
            split, replicas = everyone, Axis.single("dp_replicate", grid.rank)
        elif sharding.split == 1:
            split, replicas = alone, everyone
        else:
            split, replicas = grid.dp_shard, grid.dp_replicate
        after = sharding.after_forward
        reshard = alone if isinstance(after, bool) else grid.dp_reshard
        assert split.size == sharding.split, "the grid is of another recipe"
        assert isinstance(after, bool) or reshard.size == after, "the grid is of another recipe"
        states = split if sharding.states_split == sharding.split else everyone
        return cls(config, sharding, everyone, split, replicas, reshard, states)

    def is_whole(self, module: str) -> bool:
        """Whether the module of that path is kept out of sharding."""
        patterns = self.config.parallel.unsharded_modules
        return bool(patterns) and is_unsharded(module, self.config.model, patterns)

    def of_weights(self, module: str) -> Sharing:
        """How weights and gradients of the module of that path are shared."""
        if self.is_whole(module):
            return Sharing(split=Axis.single("dp_shard"), replicas=self.everyone)
        return Sharing(self.split, self.replicas)

    def of_states(self, module: str) -> Sharing:
        """How the optimizer's states are."""
        if self.states is self.split:
            return self.of_weights(module)
        return Sharing(self.states, Axis.single("dp_replicate"))

    @property
    def splits_states_alone(self) -> bool:
        """Whether the optimizer updates rows of what the ranks hold whole."""
        return self.states.size > self.split.size


# --- fully_shard ---------------------------------------------------------------------------------


def units(stage: DecoderStage, config: Config) -> list[list[nn.Module]]:
    """What becomes a unit of its own, in the order of computation; the rest of the stage is one
    more."""
    parallel, share = config.parallel, stage.share
    blocks, size = list(stage.layers.values()), parallel.blocks_per_unit
    # A table that is embedding and head of one stage is needed from its begin to its end.
    if config.model.tied_embeddings and share.is_first and share.is_last:
        first = last = []
    else:
        first = [[stage.embedding]] if share.is_first and parallel.wrap_embedding else []
        last = [[stage.head]] if share.is_last and parallel.wrap_head else []
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    return [*first, *groups, *last]


def shard_stage(stage: DecoderStage, config: Config, spread: Spread, device: torch.device) -> None:
    """Put `stage`'s parameters under fully_shard, in place.

    One rank that computes in the dtype it stores, where it stores it, has nothing to shard, to cast
    or to move: its stage is left as it is.
    """
    precision, offloads = config.train.precision, config.memory.cpu_offload
    compute, master = COMPUTE_DTYPES[precision], MASTER_DTYPES[precision]
    if spread.everyone.size == 1 and compute == master and not offloads:
        return
    settings = {
        "mesh": dp_mesh(spread.everyone, spread.replicas, spread.split, device),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master),
        "offload_policy": offload_policy(device) if offloads else OffloadPolicy(),
        "reshard_after_forward": bool(spread.sharding.after_forward),
        "shard_placement_fn": _kept_whole(stage, spread, device),
    }
    chain = units(stage, config)
    for modules in (*chain, [stage]):
        unit = modules[0]
        fully_shard(modules if len(modules) > 1 else unit, **settings)
        # Neither setting reaches the units below, so each is told. The sum is asked for by name
        # because a divide factor alone makes a reduction that gloo doesn't have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for modules in chain:
        # Rows are looked up by their numbers alone: backward has no use for the table.
        if modules[0] is getattr(stage, "embedding", None):
            modules[0].set_unshard_in_backward(False)
    if spread.reshard.size > 1:
        _split_between_passes(stage, spread.reshard, device)
    heads, parallel = [modules[0] for modules in chain], config.parallel
    _prefetch(stage, heads, parallel.forward_prefetch, parallel.backward_prefetch)


def offload_policy(device: torch.device) -> CPUOffloadPolicy:
    """Parameters in the host's memory: pinned if there is a device to be copied to."""
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def dp_mesh(everyone: Axis, replicas: Axis, split: Axis, device: torch.device) -> DeviceMesh:
    """The mesh that fully_shard is given: (split,), or (replicas, split) where there are any."""
    alone = None
    if replicas.size == 1 or split.size == 1:
        alone = _alone(everyone)
    group = split.group if split.size > 1 else alone
    if replicas.size == 1:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("split",))
    rows = [
        everyone.ranks[first : first + split.size] for first in range(0, everyone.size, split.size)
    ]
    return DeviceMesh.from_group(
        [replicas.group, group], device.type, rows, mesh_dim_names=("replicas", "split")
    )


def _alone(axis: Axis) -> dist.ProcessGroup:
    """A group of this rank alone."""
    return dist.new_group([axis.ranks[axis.rank]], use_local_synchronization=True)


def _kept_whole(
    stage: DecoderStage, spread: Spread, device: torch.device
) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """Which mesh each parameter is given, if any of the model's modules are kept out of sharding:
    None for the one of its unit."""
    if spread.split.size == 1 or not spread.config.parallel.unsharded_modules:
        return None
    whole = {
        parameter
        for path, module in stage.named_modules()
        for parameter in module.parameters(recurse=False)
        if spread.is_whole(path)
    }
    everyone = spread.everyone
    mesh = dp_mesh(everyone, everyone, Axis.single("dp_shard"), device)
    repeated = ShardPlacementResult(
        None, HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return lambda parameter: repeated if parameter in whole else None


def _split_between_passes(stage: DecoderStage, axis: Axis, device: torch.device) -> None:
    """Have gathered parameters split over `axis` after a forward, and gathered from there.

    fully_shard does so itself if it is given a number in place of reshard_after_forward. But then
    each unit makes groups of its own for it, in another order on each pipeline rank.
    """
    mesh = DeviceMesh.from_group(
        [_alone(axis), axis.group], device.type, [axis.ranks], mesh_dim_names=("replicas", "split")
    )
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in parameter_groups(stage):
        if group.mesh_info.shard_mesh_size == 1:
            continue
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def parameter_groups(stage: DecoderStage) -> Iterator[FSDPParamGroup]:
    """What is gathered together; a unit has two if some of its modules are kept whole."""
    states = {
        id(state): state
        for module in stage.modules()
        if isinstance(module, FSDPModule)
        for state in [module._get_fsdp_state()]
    }
    for state in states.values():
        yield from state._fsdp_param_groups


def _prefetch(stage: FSDPModule, chain: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Have each unit of `stage` begin to gather those that come after it.

    Left alone, FSDP prefetches in the order of the last forwards, which a pipeline interleaves.
    That it does so where it is told nothing is why the first one is told of itself.
    """
    stage.set_modules_to_forward_prefetch(chain[:forward])
    stage.set_modules_to_backward_prefetch(_nearest(chain, backward) or [stage])
    for index, unit in enumerate(chain):
        unit.set_modules_to_forward_prefetch(chain[index + 1 : index + 1 + forward])
        unit.set_modules_to_backward_prefetch(_nearest(chain[:index], backward) or [unit])


def _nearest(units: Sequence[FSDPModule], number: int) -> list[FSDPModule]:
    """The last so many, the last one first."""
    return list(reversed(units[max(0, len(units) - number) :]))


# --- In a step -----------------------------------------------------------------------------------


class GradientSync:
    """What a stage's units are told in the course of a step.

    Args:
        hold: keep parameters gathered until the step's last backward.
        updated: of each unit, the rows that this rank updates of parameters which it has whole.
        axis: the ranks that update the others.
        device: where messages are.
    """

    def __init__(
        self,
        stage: DecoderStage,
        *,
        hold: bool,
        updated: Sequence[Sequence[ParameterShard]] = (),
        axis: Axis | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._stage = stage if isinstance(stage, FSDPModule) else None
        self._hold = hold
        self._updated = updated
        self._axis = axis
        self._device = device

    def before_backward(self, *, is_last: bool) -> None:
        """Say whether the backward that follows completes the step's gradients.

        Args:
            is_last: it does: reduce them in its course, and let go of parameters that were held
                gathered.
        """
        if self._stage is None:
            return
        self._stage.set_requires_gradient_sync(is_last)
        self._stage.set_is_last_backward(is_last)
        self._stage.set_reshard_after_backward(is_last or not self._hold)

    def after_late_gradients(self, *, is_last: bool) -> None:
        """Take in gradients that were put off beyond their backward, and reduce them if complete.

        FSDP looks for gradients only at the end of a backward, so it is told that one has ended:
        the way of torch's own pipelines with split backwards (_PipelineStageBase in torch 2.13).
        Told so without a reduction, it takes them in in the dtype of the reduction. That comes
        first: it reduces no mixture of what it has taken in and what is new.
        """
        if self._stage is None:
            return
        for reduces in (False, True) if is_last else (False,):
            self.before_backward(is_last=reduces)
            fully_shard.state(self._stage)._root_post_backward_final_callback()

    def after_update(self) -> None:
        """Gather the new weights, where each rank has updated only some rows of them."""
        for unit in self._updated:
            _gather_rows(unit, self._axis, self._device)

    def after_evaluation(self) -> None:
        """Let go of parameters that a forward without backward has left gathered: their memory is
        wanted by the next step's activations."""
        if self._stage is None:
            return
        for unit in self._stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for group in parameter_groups(self._stage):
            for parameter in group.fsdp_params:
                # What lies split between passes; FSDP lets go of it in a backward alone.
                parameter._sharded_post_forward_param = None
                parameter._sharded_post_forward_param_data = None


@torch.no_grad()
def _gather_rows(shards: Sequence[ParameterShard], axis: Axis, device: torch.device) -> None:
    """Fill all rows of the shards' parameters with those that the ranks of `axis` have, cut as
    FSDP would: one message."""
    wholes = [local(shard.parameter.detach()) for shard in shards]
    padded = []
    for shard, whole in zip(shards, wholes, strict=True):
        rows = first_of_shard(1, axis.size, whole.shape[0])  # of the first shard, the longest
        own = whole.new_zeros((rows, *whole.shape[1:]))
        own[: shard.tensor.shape[0]] = shard.tensor
        padded.append(own.flatten())
    message = torch.cat(padded).to(device)
    gathered = all_gather(message, axis).view(axis.size, -1)
    parts = gathered.split([own.numel() for own in padded], dim=1)
    for whole, part in zip(wholes, parts, strict=True):
        whole.copy_(part.reshape(-1, *whole.shape[1:])[: whole.shape[0]])


def by_unit(
    stage: DecoderStage, config: Config, shards: Sequence[ParameterShard]
) -> list[list[ParameterShard]]:
    """The shards of each unit of `stage`."""
    paths = {module: path for path, module in stage.named_modules()}
    unit_of = {
        paths[module]: number
        for number, modules in enumerate(units(stage, config))
        for module in modules
    }
    found: dict[int | None, list[ParameterShard]] = {}
    for shard in shards:
        parts = shard.module.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        number = next((unit_of[path] for path in around if path in unit_of), None)
        found.setdefault(number, []).append(shard)
    return list(found.values())


def shards_are_final(stage: DecoderStage) -> None:
    """Tell fully_shard that nobody has exchanged `stage`'s shards since they were made.

    It looks for that before the first forward, by addresses, of which fake tensors have none; then
    it would put shards that aren't full into new memory, away from the optimizer's.
    """
    for group in parameter_groups(stage):
        for parameter in group.fsdp_params:
            parameter._init_extensions()
        group._reset_sharded_params = True


def held_by_fully_shard(stage: DecoderStage) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What fully_shard holds of whole parameters, unit by unit: the parameters, as far as they are
    gathered now (else their storages are empty), and the gradients that wait for a reduction."""
    for group in parameter_groups(stage):
        gathered, gradients = [], []
        for parameter in group.fsdp_params:
            gathered += parameter.all_gather_outputs
            whole = getattr(parameter, "_unsharded_param", None)  # from the first gather on
            gradients += [parameter.unsharded_accumulated_grad]
            gradients += [whole.grad] if whole is not None else []
        yield gathered, [grad for grad in gradients if grad is not None]
