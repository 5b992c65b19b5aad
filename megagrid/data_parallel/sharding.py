"""fully_shard over the dp axis: which units, which strategy, when gradients are reduced.

Each block of a stage is a unit; what is left of the stage (embedding, last norm, head) is one more.
A unit's parameters are gathered before it computes and its gradients reduced after it. The tp and
pp axes hold different parameters, so a unit never spans them: the dp axis is all that it is given.

    strategy        gathered                      kept sharded over dp
    FULL_SHARD      each microbatch, each way     parameters, gradients, optimizer
    SHARD_GRAD_OP   once a step                   the same, but parameters stay gathered meanwhile
    NO_SHARD        never                         nothing

Gradients are summed, not averaged (the loss is already divided by the tokens of the whole grid),
and once a step: in each stage's last backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megagrid.grid.grid import Axis, Grid
from megagrid.model.decoder import DecoderStage


@dataclass(frozen=True)
class Strategy:
    """A row of the table above.

    Attributes:
        shards: whether parameters are split over dp.
        holds: whether gathered parameters are kept from a step's first forward to its last
            backward.
    """

    shards: bool
    holds: bool


STRATEGIES = {
    "FULL_SHARD": Strategy(shards=True, holds=False),
    "SHARD_GRAD_OP": Strategy(shards=True, holds=True),
    "NO_SHARD": Strategy(shards=False, holds=True),
}

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def shard_stage(stage: DecoderStage, grid: Grid, strategy: Strategy, precision: str) -> None:
    """Put `stage`'s parameters under fully_shard over the dp axis, in place.

    One rank that computes in the dtype it stores has nothing to shard and nothing to cast: its
    stage is left as it is.
    """
    compute, master = COMPUTE_DTYPES[precision], MASTER_DTYPES[precision]
    if grid.dp_cp.size == 1 and compute == master:
        return
    mesh = dp_mesh(grid.dp_cp, grid.device, strategy)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master)
    blocks = list(stage.layers.values())
    for unit in (*blocks, stage):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not strategy.holds)
        # Neither setting reaches the units below, so each is told. The sum is asked for by name
        # because a divide factor alone makes a reduction that gloo doesn't have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    # Left alone, FSDP prefetches in the order of the last forwards, which a pipeline interleaves.
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def dp_mesh(dp: Axis, device: torch.device, strategy: Strategy) -> DeviceMesh:
    """The mesh that fully_shard is given: (dp,), or (dp, 1) where parameters aren't split."""
    alone = None
    if dp.size == 1 or not strategy.shards:
        alone = dist.new_group([dp.ranks[dp.rank]], use_local_synchronization=True)
    if strategy.shards:
        group = dp.group if dp.size > 1 else alone
        return DeviceMesh.from_group(group, device.type, list(dp.ranks), mesh_dim_names=("dp",))
    replicas = dp.group if dp.size > 1 else alone
    return DeviceMesh.from_group(
        [replicas, alone],
        device.type,
        [[rank] for rank in dp.ranks],
        mesh_dim_names=("dp", "shard"),
    )


class GradientSync:
    """Tells a stage's units, before each backward, whether it completes the step's gradients."""

    def __init__(self, stage: DecoderStage, strategy: Strategy) -> None:
        self._stage = stage if isinstance(stage, FSDPModule) else None
        self._strategy = strategy

    def before_backward(self, *, is_last: bool) -> None:
        """
        Args:
            is_last: the backward completes the step's gradients: reduce them in its course, and
                let go of parameters that were held gathered.
        """
        if self._stage is None:
            return
        self._stage.set_requires_gradient_sync(is_last)
        self._stage.set_is_last_backward(is_last)
        self._stage.set_reshard_after_backward(is_last or not self._strategy.holds)

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

    def after_evaluation(self) -> None:
        """Let go of parameters that a forward without backward has left gathered: their memory is
        wanted by the next step's activations."""
        if self._stage is None:
            return
        for unit in self._stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
