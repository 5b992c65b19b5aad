"""What one rank communicates in one optimizer step, in closed form: every call, along which axis,
and its bytes. `megagrid.comm.ledger` counts the same in a real step; the two are equal. Pure.

With s the sequence, b the micro batch, h hidden, n layers on the rank, m microbatches and
a = s b h elements in the compute dtype (t, d: ranks along tp and dp):

    axis   what                    collective                   calls           each
    -----------------------------------------------------------------------------------------
    tp     layers                  all_reduce                   4 n m           a
           … sequence parallel     all_gather, reduce_scatter   4 n m of each   a
           embedding, head         half of a layer's, each where it is
           loss                    all_reduce                   2 m             s b, 2 s b
    pp     hidden states           send or recv                 m a boundary    a, or a / t with SP
           their gradients         recv or send                 m a boundary    the same
    dp     FULL_SHARD, a unit      all_gather                   2 m             its parameters
                                   reduce_scatter               1               its gradients
           SHARD_GRAD_OP           all_gather                   1
                                   reduce_scatter               1
           NO_SHARD                all_reduce                   1
           valid tokens            all_reduce                   1               8 bytes
    tp, kv, embedding              all_reduce                   1 a stage       gradients in parts
    world  norm, loss, news,       all_reduce                   1               8 (4 + ranks) bytes
           memory

The step's gradients are reduced once, however many microbatches it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import microbatches, training_schedule
from megagrid.plan.parameters import MASTER_BYTES, ModelShare, Unit, summand_elements

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Of an element of activations and gathered parameters."""


@dataclass(frozen=True)
class Row:
    """A kind of call.

    Attributes:
        what: what it is for.
        axis, collective: as in the ledger.
        calls: on this rank, in one step.
        bytes: of one call: an all-reduce's or reduce-scatter's input, an all-gather's output, a
            message.
    """

    what: str
    axis: str
    collective: str
    calls: int
    bytes: int


REGIONS: dict[str, dict[bool, tuple[str | None, str | None]]] = {
    "enter": {False: (None, "all_reduce"), True: ("all_gather", "reduce_scatter")},
    "leave": {False: ("all_reduce", None), True: ("reduce_scatter", "all_gather")},
}
"""What a region of `megagrid.comm.regions` issues forward and backward; True: sequence parallel.
The gathered input is kept for backward, so it isn't gathered again."""

GATHERS: dict[str, tuple[int, int]] = {
    "FULL_SHARD": (0, 2),
    "SHARD_GRAD_OP": (1, 0),
    "NO_SHARD": (0, 0),
}
"""All-gathers of a unit in a step: so many, and so many more for each microbatch."""


def step_communication(config: Config, placement: Placement, coordinate: Coordinate) -> list[Row]:
    """Every collective and message of the rank at `coordinate`, in one step without evaluation.

    Rows with nothing to do, and axes of one rank, are left out.
    """
    rank = _Rank(config, placement, coordinate)
    rows = [
        *_tensor_parallel(rank),
        *_pipeline(rank),
        *_data_parallel(rank),
        *_summands(rank),
        Row("valid tokens", "dp", "all_reduce", 1, 8),
        Row("norm, loss, news, memory", "world", "all_reduce", 1, 8 * (4 + placement.world_size)),
    ]
    return [row for row in rows if row.calls and rank.axis_size(row.axis) > 1]


def as_calls(rows: Iterable[Row]) -> Counter[tuple[str, str, int]]:
    """How often each (axis, collective, bytes) is called: what `Ledger.calls` is after a step."""
    calls: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        calls[row.axis, row.collective, row.bytes] += row.calls
    return calls


def wire_bytes(row: Row, axis_size: int) -> float:
    """Bytes that the rank sends for the calls of `row`, by the algorithms that send least: rings
    (Patarasuk & Yuan 2009), in which an all-reduce is a reduce-scatter and an all-gather."""
    others = (axis_size - 1) / axis_size
    share = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "send": 1}
    return row.calls * row.bytes * share.get(row.collective, 0)


class _Rank:
    """One rank's part of the model, and the sizes that the closed forms are made of."""

    def __init__(self, config: Config, placement: Placement, coordinate: Coordinate) -> None:
        train, parallel, model = config.train, config.parallel, config.model
        self.placement = placement
        self.coordinate = coordinate
        self.strategy = parallel.sharding_strategy
        self.sequence_parallel = parallel.sequence_parallel and placement.tp > 1
        self.microbatches = microbatches(config, placement)
        self.compute_bytes = COMPUTE_BYTES[train.precision]
        self.master_bytes = MASTER_BYTES[train.precision]
        self.tokens = train.seq_length * train.micro_batch_size
        self.activation_bytes = self.tokens * model.hidden_size * self.compute_bytes
        self.share = ModelShare(model, placement.tp, coordinate.tp, self.sequence_parallel)
        self.schedule = training_schedule(config, placement)
        self.last_stage = self.schedule.num_stages - 1
        self.stages = self.schedule.stages_of_rank(coordinate.pp)
        self.layers = stage_layers(config, placement, self.schedule.placement)
        self.num_layers = sum(len(self.layers[stage]) for stage in self.stages)

    @property
    def has_embedding(self) -> bool:
        return 0 in self.stages

    @property
    def has_head(self) -> bool:
        return self.last_stage in self.stages

    def ends(self, stage: int) -> Unit:
        """The unit of a stage's parameters outside its layers."""
        return self.share.ends(is_first=stage == 0, is_last=stage == self.last_stage)

    def units(self, stage: int) -> list[Unit]:
        """All units of a stage."""
        return [*[self.share.layer()] * len(self.layers[stage]), self.ends(stage)]

    def axis_size(self, axis: str) -> int:
        ends = {self.schedule.rank_of_stage(stage) for stage in (0, self.last_stage)}
        sizes = {
            "kv": self.share.kv_copies,
            "embedding": len(ends) if self.coordinate.pp in ends else 1,
            "world": self.placement.world_size,
        }
        return sizes[axis] if axis in sizes else self.placement.size(axis)


def _tensor_parallel(rank: _Rank) -> Iterator[Row]:
    """Two regions in and two out for each layer; the ends have one each; the loss two numbers and
    then one per token."""
    m = rank.microbatches
    for what, region, times in (
        ("layers in", "enter", 2 * rank.num_layers),
        ("layers out", "leave", 2 * rank.num_layers),
        ("embedding out", "leave", int(rank.has_embedding)),
        ("head in", "enter", int(rank.has_head)),
    ):
        collectives = REGIONS[region][rank.sequence_parallel]
        for direction, collective in zip(("forward", "backward"), collectives, strict=True):
            if collective is not None:
                bytes_ = rank.activation_bytes
                yield Row(f"{what}, {direction}", "tp", collective, times * m, bytes_)
    if rank.has_head:
        number_per_token = rank.tokens * rank.master_bytes
        yield Row("loss, highest logit", "tp", "all_reduce", m, number_per_token)
        yield Row("loss, sum and label's logit", "tp", "all_reduce", m, 2 * number_per_token)


def _pipeline(rank: _Rank) -> Iterator[Row]:
    """A message each way for each microbatch and boundary between stages of two ranks."""
    message = rank.activation_bytes // (rank.placement.tp if rank.sequence_parallel else 1)
    for stage in range(rank.last_stage):
        before, after = (rank.schedule.rank_of_stage(n) for n in (stage, stage + 1))
        if before == after:
            continue
        for pp_rank, forward, backward in ((before, "send", "recv"), (after, "recv", "send")):
            if pp_rank == rank.coordinate.pp:
                between = f"stage {stage} to {stage + 1}"
                yield Row(f"hidden, {between}", "pp", forward, rank.microbatches, message)
                yield Row(f"gradient, {between}", "pp", backward, rank.microbatches, message)


def _data_parallel(rank: _Rank) -> Iterator[Row]:
    """Each unit's parameters gathered as the strategy has it, its gradients reduced once."""
    units = [("layers", rank.share.layer(), rank.num_layers)]
    units += [(f"ends of stage {stage}", rank.ends(stage), 1) for stage in rank.stages]
    shards = rank.strategy != "NO_SHARD"
    for what, unit, times in units:
        elements = sum(parameter.gathered(rank.placement.dp if shards else 1) for parameter in unit)
        if elements == 0:
            continue
        once, each = GATHERS[rank.strategy]
        gathers = times * (once + each * rank.microbatches)
        reduce = "reduce_scatter" if shards else "all_reduce"
        gradients = elements * rank.master_bytes
        yield Row(f"{what}, parameters", "dp", "all_gather", gathers, elements * rank.compute_bytes)
        yield Row(f"{what}, gradients", "dp", reduce, times, gradients)


def _summands(rank: _Rank) -> Iterator[Row]:
    """Gradients of which ranks have summands, added up on the shards that dp leaves: one message
    for each stage and axis."""
    shards = rank.strategy != "NO_SHARD"
    dp, dp_rank = (rank.placement.dp, rank.coordinate.dp) if shards else (1, 0)
    for axis, what in (
        ("tp", "norms and biases"),
        ("kv", "shared key/value heads"),
        ("embedding", "tied embedding"),
    ):
        for stage in rank.stages:
            elements = summand_elements(rank.units(stage), axis, dp, dp_rank)
            calls = 1 if elements else 0
            yield Row(what, axis, "all_reduce", calls, elements * rank.master_bytes)
