"""A rank that isn't there against one that is: equal bytes at rest, at the peak, on the wire."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megagrid.config.rules import check
from megagrid.dryrun.measure import Measurement, measure
from megagrid.dryrun.rank import batches_of_zeros, dry_run
from megagrid.dryrun.storages import LettingGo
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of
from megagrid.plan.comm import as_calls, step_communication
from megagrid.plan.memory import persistent_bytes
from megagrid.train.build import build_engine
from tests.equivalence.case import Case, Variant

LLAMA, GPT = Variant("llama"), Variant("gpt")
STATES_ON_HOST = ("memory.cpu_offload", True)
LAYERS_ON_HOST = ("memory.activation_offload", True)


def measured(config, placement) -> Measurement:
    """A step of this rank, with its peers and with memory."""
    grid = grid_of(config, placement, dist.get_rank(), "cpu")
    engine = build_engine(config, grid)
    with LettingGo():
        return measure(engine, batches_of_zeros(config, placement))


CASES = [
    Case(LLAMA, micro_batch=4),
    Case(GPT.having(("model.dropout", 0.1), ("model.attention_dropout", 0.1))),
    Case(LLAMA, Placement(tp=2), micro_batch=4, keys=(("parallel.sequence_parallel", True),)),
    Case(LLAMA.having(("model.tied_embeddings", True)), Placement(pp=2)),
    Case(Variant("llama", "bf16"), Placement(dp=2)),
    Case(
        LLAMA,
        Placement(pp=2),
        keys=(("parallel.pipeline_schedule", "ZBV"), ("parallel.virtual_pipeline_size", 2)),
    ),
    Case(GPT, Placement(dp=2), keys=(("parallel.sharding_strategy", "NO_SHARD"),)),
    Case(LLAMA, Placement(tp=2, dp=2), micro_batch=4),
    Case(
        LLAMA.having(("data.document_mask", True), ("data.paths", ["books"])),
        Placement(cp=2),
        micro_batch=8,
    ),
    Case(LLAMA, Placement(cp=2), 8, (("parallel.context_parallel", "ring"),)),
    Case(GPT, Placement(cp=2), 8, (("parallel.context_parallel", "ulysses"),)),
    Case(
        Variant("gpt", "bf16"), Placement(tp=2, pp=2), keys=(("parallel.sequence_parallel", True),)
    ),
    Case(
        LLAMA,
        Placement(pp=2, dp=2),
        keys=(
            ("parallel.pipeline_schedule", "ZB1P"),
            ("parallel.sharding_strategy", "SHARD_GRAD_OP"),
        ),
    ),
    Case(LLAMA.having(STATES_ON_HOST), Placement(dp=2)),
    Case(LLAMA.having(LAYERS_ON_HOST), Placement(pp=2), micro_batch=4),
    Case(
        Variant("gpt", "bf16").having(STATES_ON_HOST, LAYERS_ON_HOST),
        Placement(tp=2, dp=2),
        micro_batch=4,
        keys=(("parallel.sharding_strategy", "ZERO1"),),
    ),
    Case(
        LLAMA.having(STATES_ON_HOST, LAYERS_ON_HOST, ("memory.recompute", "selective")),
        Placement(pp=2),
        keys=(("parallel.pipeline_schedule", "ZB1P"),),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_dry_run_finds_what_is_measured_on_a_real_rank(ranks, case):
    config, placement = case.config, case.placement
    check(config, placement.world_size)
    real = ranks.run(measured, config, placement, world_size=placement.world_size)
    for rank in sorted({0, placement.world_size - 1}):
        there = real[rank]
        found = dry_run(config, placement, rank).found
        assert found.calls == there.calls
        assert found.resting == there.resting
        coordinate = placement.coordinate(rank)
        planned = step_communication(config, placement, coordinate)
        assert dict(found.calls) == dict(as_calls(planned))
        states = persistent_bytes(config, placement, coordinate)
        resting = found.host_resting if config.memory.cpu_offload else found.resting
        assert resting["weights"] == states.weights
        assert resting["optimizer states"] == states.total - states.weights
        for mine, real_one in ((found.peak, there.peak), (found.host_peak, there.host_peak)):
            assert mine.by_kind() == real_one.by_kind()
            assert (mine.bytes, mine.where) == (real_one.bytes, real_one.where)
        assert found.host_resting == there.host_resting
        in_use = config.memory.cpu_offload or config.memory.activation_offload
        assert bool(found.host_peak.bytes) == in_use
