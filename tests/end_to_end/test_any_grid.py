"""A run that moves from grid to grid stays the same run: every box, every sample, every loss.

Rows C4, C14 and C15 of the faults that other trainers have had.

    steps 1 2 | 3 4 | 5 6 | …           one folder, one metrics.jsonl
       tp2xdp2|  pp4|  tp4|             what a grid finds when it has resumed is, bit by bit, what
              ^     ^     ^             the former one held in memory when it ended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from megagrid import checkpoint
from megagrid.grid.placement import Placement
from megagrid.train.metrics import StepRecord
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALL_AXES,
    ALONE,
    BF16,
    DP2,
    DP4,
    DROPOUT,
    FP64,
    GPIPE,
    GPT,
    INTERLEAVED,
    PP2,
    PP2DP2,
    PP4,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    ZB1P,
    ZBV,
    Sections,
    Trainer,
    Training,
    assert_parity,
    layers_per_stage,
    merged,
    name_of,
    run_and_note_samples,
    strategy,
)
from tests.equivalence.tolerance import DEVIATIONS
from tests.equivalence.trainer import Held, Model, assemble

STEPS = 2
"""On each grid: the second one shows moments that got lost, which the first alone hides."""


@dataclass(frozen=True)
class Leg:
    """A grid that the run stays on for `STEPS` steps; keys of [parallel]."""

    placement: Placement
    keys: Sections = field(default_factory=dict)

    def __str__(self) -> str:
        values = self.keys.get("parallel", {}).values()
        words = [str(value).replace(" ", "") for value in values if isinstance(value, str | list)]
        return "-".join([name_of(self.placement), *words])


def leg(placement: Placement, *keys: Sections) -> Leg:
    return Leg(placement, merged(*keys))


RING = {"parallel": {"context_parallel": "ring"}}
NO_SHARD, SHARD_GRAD_OP = strategy("NO_SHARD"), strategy("SHARD_GRAD_OP")
ZERO1 = strategy("ZERO1")
HYBRID = {"parallel": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}}
OVER_TWO = {"parallel": {"reshard_after_forward": 2}}
KEEP_NORMS = {"parallel": {"unsharded_modules": ["norm", "layers.*_norm", "layers.1.attention"]}}
OFFLOAD = {"memory": {"cpu_offload": True}}
PADDED = {"model": {"make_vocab_size_divisible_by": 5}}
"""61 words are 65 rows on one tp rank, 70 on two, 80 on four."""

JOURNEYS = {
    # Fused QKV, with biases, and gate/up; eight heads of two key/value heads; norms of heads.
    "llama-biases-norms": (
        merged(PADDED, {"model": {"qkv_bias": True, "qk_norm": True}}),
        [
            leg(TP2DP2, SP),
            leg(PP2DP2, ZBV, NO_SHARD),
            leg(TP4, SP),  # two ranks a key/value head
            leg(PP4, layers_per_stage(2, 0, 1, 1)),
            leg(Placement(cp=2, dp=2), RING),
            leg(ALONE),
        ],
    ),
    # The same tensor at both ends of the pipeline, and one key/value head for all ranks.
    "llama-tied-mqa": (
        merged(TIED, {"model": {"num_kv_heads": 1}}),
        [
            leg(PP2, INTERLEAVED, layers_per_stage(1, 2, 0, 1)),
            leg(TP2PP2, SP),
            leg(DP2, SHARD_GRAD_OP),
            leg(PP2DP2, ZBV),
            leg(TP4),
            leg(PP4, ZB1P),
        ],
    ),
    # Biases, learned positions, dropout.
    "gpt-tied-dropout": (
        merged(GPT, DROPOUT, TIED, PADDED),
        [
            leg(ALONE),
            leg(TP2PP2, GPIPE),
            leg(DP4, NO_SHARD),
            leg(TP4, SP),
            leg(PP2, ZB1P, layers_per_stage(3, 1)),
            leg(TP2DP2),
        ],
    ),
    # Master weights and moments are fp32.
    "llama-bf16": (
        merged(BF16, PADDED),
        [
            leg(PP2DP2, INTERLEAVED, NO_SHARD),
            leg(TP2DP2, SHARD_GRAD_OP),
            leg(ALONE),
            leg(TP4, SP),
            leg(PP2, layers_per_stage(1, 3)),
        ],
    ),
    # Weights and moments in other ranks' hands than one another, and in the host's memory.
    "llama-shards": (
        merged(PADDED, TIED),
        [
            leg(DP4, HYBRID),
            leg(PP2DP2, ZERO1, ZBV),
            leg(DP4, OFFLOAD, OVER_TWO),
            leg(TP2DP2, KEEP_NORMS, SP),
            leg(DP2, ZERO1, OFFLOAD),
            leg(PP2DP2, SHARD_GRAD_OP),
        ],
    ),
    "eight-ranks": (
        TIED,
        [
            leg(ALL_AXES, SP),
            leg(TP2),
            leg(Placement(tp=4, pp=2), ZBV),
            leg(Placement(pp=2, dp=4), NO_SHARD),
            leg(ALONE),
        ],
    ),
}
SLOW = ["eight-ranks"]


def test_the_journeys_have_more_than_twelve_moves_between_unlike_grids():
    moves = {(str(a), str(b)) for _, legs in JOURNEYS.values() for a, b in pairwise(legs)}
    assert len(moves) > 12
    assert all(a != b for a, b in moves)


@dataclass(frozen=True)
class Stay:
    """What a rank held of weights and moments as its leg began and as it ended."""

    found: list[Held]
    left: list[Held]


def stay(run: Run) -> Stay:
    found = held(run)
    run.run()
    return Stay(found, held(run))


def held(run: Run) -> list[Held]:
    """Copies of all boxes on this rank, those that other ranks hold and write as well included."""
    return [
        Held(
            entry.name,
            entry.shape,
            entry.box.offsets,
            entry.tensor.clone().numpy(),
            entry.is_written_here,
        )
        for entry in checkpoint.entries(run.engine.shards, run.engine.optimizer)
    ]


def travel(trainer: Trainer, model: Sections, legs: Sequence[Leg]) -> list[Training]:
    """Train on each leg in turn, in one folder."""
    trainings: list[Training] = []
    for number, stop in enumerate(legs, start=1):
        keys = merged(model, stop.keys, length(number), {"checkpoint": {"resume": "latest"}})
        if trainings:
            keys["logging"] = {"run_dir": str(trainings[0].folder)}
        trainings.append(trainer.train(stop.placement, keys, work=stay))
    return trainings


def length(legs: int) -> Sections:
    """So many legs, under a learning rate in which the length of a run has no say."""
    return {"train": {"steps": STEPS * legs}, "lr_schedule": {"kind": "constant"}}


def misplaced(found: Sequence[Held], model: Model) -> list[str]:
    """Boxes that aren't, bit by bit, that rectangle of `model`."""
    return [
        f"{box.name} at {box.offsets}"
        for box in found
        if box.values.dtype != model[box.name].dtype
        or box.values.tobytes() != rectangle(box, model[box.name]).tobytes()
    ]


def rectangle(box: Held, tensor: np.ndarray) -> np.ndarray:
    return tensor[
        tuple(
            slice(first, first + size)
            for first, size in zip(box.offsets, box.values.shape, strict=True)
        )
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in JOURNEYS]
)
def test_a_run_moves_from_grid_to_grid(trainer, name):
    model, legs = JOURNEYS[name]
    trainings = travel(trainer, model, legs)
    for stop, before, after in zip(legs[1:], trainings, trainings[1:], strict=False):
        whole = assemble([box for rank in before.ranks for box in rank.result.left], "the former")
        found = [box for rank in after.ranks for box in rank.result.found]
        assert {box.name for box in found} == whole.keys(), stop
        assert {values.dtype.name for values in whole.values()} == {"float32"}
        assert misplaced(found, whole) == [], stop
    records = trainings[-1].records
    assert [record.step for record in records] == list(range(1, STEPS * len(legs) + 1))
    steps = length(len(legs))
    reference = trainer.reference(model, steps)
    assert_parity(records, reference.records, **tolerances(trainer, reference, model, steps))


def tolerances(trainer: Trainer, reference: Training, *keys: Sections) -> dict[str, float]:
    """Of losses and norms: T0's own, or in bf16 those of `tests.equivalence.tolerance`, from how
    far one process in bf16 is from the same in fp64."""
    if reference.config.train.precision != "bf16":
        return {}
    exact = trainer.reference(*keys, FP64).records

    def spread(off: list[float]) -> float:
        return DEVIATIONS * float(np.sqrt(np.square(off).mean()))

    def pairs() -> zip[tuple[StepRecord, StepRecord]]:
        return zip(reference.records, exact, strict=True)

    return {
        "loss": spread([bf16.loss - fp64.loss for bf16, fp64 in pairs()]),
        "grad_norm": spread([bf16.grad_norm / fp64.grad_norm - 1 for bf16, fp64 in pairs()]),
    }


def test_no_sample_is_lost_or_seen_twice_as_the_global_batch_changes(trainer):
    """C4: what metrics.jsonl says was fed, and what the ranks have computed."""
    legs = [(ALONE, 8), (DP2, 4), (TP2, 16), (PP2DP2, 12), (ALONE, 2)]
    folder = None
    computed: list[int] = []
    for number, (placement, batch) in enumerate(legs, start=1):
        keys = merged(length(number), {"train": {"global_batch_size": batch}})
        keys["checkpoint"] = {"resume": "latest"}
        if folder is not None:
            keys["logging"] = {"run_dir": str(folder)}
        training = trainer.train(placement, keys, work=run_and_note_samples)
        folder = training.folder
        for step in range(STEPS):
            # Ranks that differ along tp or pp alone share their samples.
            shares = {tuple(rank.result[step]) for rank in training.ranks}
            assert len(shares) == placement.dp
            computed += sorted(sample for share in shares for sample in share)
    fed = [
        sample
        for first, last in (record.sample_ids for record in training.records)
        for sample in range(first, last + 1)
    ]
    assert fed == computed == list(range(STEPS * sum(batch for _, batch in legs)))
