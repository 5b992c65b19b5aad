"""A stage made parallel: TP as DTensors, weights loaded, then fully_shard over dp."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.peers.systems.native.model import LlamaStage


def apply_tensor_parallel(stage: LlamaStage, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Megatron's split over `mesh`, in place (Shoeybi et al. 2019; with sequence parallelism
    Korthikanti et al. 2022).

    Attention and MLP take their input once as a DTensor: the partial gradients of the projections
    add up locally and cross the mesh in one reduction instead of one each.
    """
    residual = Shard(1) if sequence_parallel else Replicate()

    def take(count: int) -> PrepareModuleInput:
        extra = (None,) * (count - 1)
        return PrepareModuleInput(
            input_layouts=(residual, *extra), desired_input_layouts=(Replicate(), *extra)
        )

    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "model.layers.*.self_attn": take(2),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=residual),
        "model.layers.*.mlp": take(1),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=residual),
        # Logits stay split over the vocabulary; loss_parallel reads them so.
        "lm_head": ColwiseParallel(
            input_layouts=residual, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence_parallel:
        plan["model.layers.*.input_layernorm"] = SequenceParallel(use_local_output=True)
        plan["model.layers.*.post_attention_layernorm"] = SequenceParallel(use_local_output=True)
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    present = {name for name, _ in stage.named_modules()}
    plan = {name: style for name, style in plan.items() if "*" in name or name in present}
    parallelize_module(stage, mesh, plan, src_data_rank=None)


def load_weights(stage: nn.Module, checkpoint: Path) -> None:
    """Gives a stage that was built on the meta device memory, and fills it tensor by tensor.

    At most one whole tensor is in memory beside this rank's shards.
    """
    rotary = stage.rotary
    stage.to_empty(device="cpu")
    stage.rotary = rotary
    with torch.no_grad(), safe_open(checkpoint / "model.safetensors", "pt") as weights:
        for name, parameter in stage.named_parameters():
            whole = weights.get_tensor(name)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)


def apply_fsdp(stage: LlamaStage, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    """One unit a block, and a root unit of embedding, last norm and head."""
    for block in stage.model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # The root is needed again at once: its backward comes first.
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def sync_gradients(stage: nn.Module, last: bool) -> None:
    """Says whether the next backward ends the accumulation: only then does FSDP reduce."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last)
        stage.set_is_last_backward(last)
