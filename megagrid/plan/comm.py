"""What one rank communicates in one optimizer step, in closed form: every call, along which axis,
and its bytes. `megagrid.comm.ledger` counts the same in a real step; the two are equal. Pure.

With s the sequence of a cp rank, b the micro batch, h hidden, n layers on the rank, m microbatches
and a = s b h elements in the compute dtype (t, c, d: ranks along tp, cp and dp). q and k are the
elements of a tp rank's queries and keys in s b tokens; k' is k, but at least a head a cp rank:

    axis   what                    collective                   calls           each
    -----------------------------------------------------------------------------------------
    tp     layers                  all_reduce                   4 n m           a
           … sequence parallel     all_gather, reduce_scatter   4 n m of each   a
           … computed again        as below, for each layer that is
           embedding, head         half of a layer's, each where it is
           loss, a chunk of c      all_reduce                   2 m             c, 2 c; c = s b
                                                                                in one chunk
    pp     hidden states           send or recv                 m a boundary    a, or a / t with SP
           their gradients         recv or send                 m a boundary    the same
    cp     all_gather               all_gather                   n m             2 k c
                                    reduce_scatter               n m             2 k c
           ulysses                  all_to_all                   2 n m           q + 2 k'
                                    all_to_all                   2 n m           q
           ring                     send, recv                   2 n m (c - 1)   2 k
           … gradients              send, recv                   n m c           2 k, not below fp32
    dp     FULL_SHARD, a unit      all_gather                   2 m             its parameters
           embedding apart         all_gather                   m
                                   reduce_scatter               1               its gradients
           SHARD_GRAD_OP           all_gather                   1
                                   reduce_scatter               1
           ZERO1                   all_reduce, all_gather       1 of each       gradients; weights
           NO_SHARD                all_reduce                   1
           kept out of sharding    all_reduce                   1
           valid tokens            all_reduce                   1               8 bytes
    dp_shard       HYBRID_SHARD    as FULL_SHARD
    dp_replicate                   all_reduce                   1               a shard's gradients
    tp, kv, embedding              all_reduce                   1 a stage       gradients in parts
    stage  Muon, a bucket          all_to_all                   2               boxes, see below
    world  norm, loss, news,       all_reduce                   1               8 (5 + ranks) bytes
           memory

The step's gradients are reduced once, however many microbatches it has. How often parameters are
gathered where they stay so between passes, or lie split over fewer ranks (axis dp_reshard), depends
on the order of a stage's forwards and backwards: `_gathers`. Muon's matrices are dealt to the ranks
with the same stages in buckets; to a bucket's owners a rank sends its boxes of them, and the owners
send back everyone's boxes (`megagrid.plan.matrices`). Where cp is above 1, what is said of dp is
done along dp_cp, the ranks of both.

Backward issues again what comes before the last tensor that it lacks (`megagrid.nn.recompute`):
under memory.recompute "selective" the gathers of sequence parallelism and what cp does in forward;
under "full" those and the end of attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megagrid.config.schema import Config, Recompute
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import microbatches, training_schedule
from megagrid.pipeline.schedules import Action, Kind, Schedule
from megagrid.pipeline.schedules.action import GRADIENTS
from megagrid.plan.flops import recomputed_layers
from megagrid.plan.matrices import Holders, deal, splits
from megagrid.plan.parameters import MASTER_BYTES, ModelShare, is_split
from megagrid.plan.units import PlannedUnit, stage_units

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
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
        peer: of a message, the other rank's index along the axis.
    """

    what: str
    axis: str
    collective: str
    calls: int
    bytes: int
    peer: int | None = None


REGIONS: dict[str, dict[bool, tuple[str | None, str | None]]] = {
    "enter": {False: (None, "all_reduce"), True: ("all_gather", "reduce_scatter")},
    "leave": {False: ("all_reduce", None), True: ("reduce_scatter", "all_gather")},
}
"""What a region of `megagrid.comm.regions` issues forward and backward; True: sequence parallel.
The gathered input is kept for backward, unless that is told to make it again."""

RECOMPUTED_REGIONS: dict[Recompute, dict[str, int]] = {
    "none": {"enter": 0, "leave": 0},
    "selective": {"enter": 2, "leave": 0},
    "full": {"enter": 2, "leave": 1},
}
"""Forwards of regions that the backward of a recomputed layer runs again."""


def step_communication(config: Config, placement: Placement, coordinate: Coordinate) -> list[Row]:
    """Every collective and message of the rank at `coordinate`, in one step without evaluation.

    Rows with nothing to do, and axes of one rank, are left out.
    """
    rank = _Rank(config, placement, coordinate)
    rows = [
        *_tensor_parallel(rank),
        *_context_parallel(rank),
        *_pipeline(rank),
        *_data_parallel(rank),
        *_summands(rank),
        *_muon(rank),
        Row("valid tokens", rank.sharding.axis, "all_reduce", 1, 8),
        Row("norm, loss, news, memory", "world", "all_reduce", 1, 8 * (5 + placement.world_size)),
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
    share = {"all_reduce": 2 * others, "send": 1}
    share |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), others)
    return row.calls * row.bytes * share.get(row.collective, 0)


class _Rank:
    """One rank's part of the model, and the sizes that the closed forms are made of."""

    def __init__(self, config: Config, placement: Placement, coordinate: Coordinate) -> None:
        train, parallel, model = config.train, config.parallel, config.model
        self.placement = placement
        self.coordinate = coordinate
        self.config = config
        self.sharding = Sharding.of(config, placement)
        self.shard_index = self.sharding.index(placement, coordinate)
        self.sequence_parallel = parallel.sequence_parallel and placement.tp > 1
        self.microbatches = microbatches(config, placement)
        self.compute_bytes = COMPUTE_BYTES[train.precision]
        self.master_bytes = MASTER_BYTES[train.precision]
        self.model = model
        self.exchange = parallel.context_parallel
        self.tokens = train.seq_length // placement.cp * train.micro_batch_size
        self.activation_bytes = self.tokens * model.hidden_size * self.compute_bytes
        self.share = ModelShare(model, placement.tp, coordinate.tp, self.sequence_parallel)
        self.schedule = training_schedule(config, placement)
        self.last_stage = self.schedule.num_stages - 1
        self.stages = self.schedule.stages_of_rank(coordinate.pp)
        self.layers = stage_layers(config, placement, self.schedule.placement)
        self.num_layers = sum(len(self.layers[stage]) for stage in self.stages)
        self.loss_chunk = train.loss_chunk_tokens
        self.recompute = config.memory.recompute
        self.recomputed_layers = sum(
            recomputed_layers(self.layers[stage], self.recompute, config.memory.recompute_interval)
            for stage in self.stages
        )

    @property
    def loss_chunks(self) -> Counter[int]:
        """How many chunks of so many tokens each a microbatch's loss is computed in."""
        chunk = self.loss_chunk or self.tokens
        return Counter(min(chunk, self.tokens - first) for first in range(0, self.tokens, chunk))

    @property
    def has_embedding(self) -> bool:
        return 0 in self.stages

    @property
    def has_head(self) -> bool:
        return self.last_stage in self.stages

    def units(self, stage: int) -> list[PlannedUnit]:
        """All units of a stage."""
        return stage_units(
            self.config,
            self.share,
            self.layers[stage],
            is_first=stage == 0,
            is_last=stage == self.last_stage,
        )

    def order(self, stage: int) -> list[Action]:
        """The forwards and backwards of a stage of this rank."""
        schedule, pp = self.schedule, self.coordinate.pp
        is_schedule = isinstance(schedule, Schedule)
        order = schedule.orders[pp] if is_schedule else schedule.compute_order(pp)
        return [action for action in order if action.stage == stage]

    def axis_size(self, axis: str) -> int:
        ends = {self.schedule.rank_of_stage(stage) for stage in (0, self.last_stage)}
        sizes = {
            "kv": self.share.kv_copies,
            "embedding": len(ends) if self.coordinate.pp in ends else 1,
            "world": self.placement.world_size,
            "dp_cp": self.sharding.ranks,
            "dp_shard": self.sharding.split,
            "dp_replicate": self.sharding.replicas,
            "dp_reshard": int(self.sharding.after_forward),
            "stage": self.sharding.ranks * self.placement.tp,
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
    for region, times in RECOMPUTED_REGIONS[rank.recompute].items():
        collective, _ = REGIONS[region][rank.sequence_parallel]
        if collective is not None:
            calls = times * rank.recomputed_layers * m
            yield Row(f"layers, {region} again", "tp", collective, calls, rank.activation_bytes)
    for tokens, chunks in rank.loss_chunks.items():
        number_per_token = tokens * rank.master_bytes
        calls = m * chunks if rank.has_head else 0
        yield Row("loss, highest logit", "tp", "all_reduce", calls, number_per_token)
        yield Row("loss, sum and label's logit", "tp", "all_reduce", calls, 2 * number_per_token)


def _context_parallel(rank: _Rank) -> Iterator[Row]:
    """What attention takes of other tokens, in each layer, and once more where it is recomputed."""
    model, tp, cp = rank.model, rank.placement.tp, rank.placement.cp
    backward = rank.num_layers * rank.microbatches
    forward = backward + rank.recomputed_layers * rank.microbatches
    elements = rank.tokens * model.head_dim
    kv_heads = model.num_kv_heads * rank.share.kv_copies // tp
    queries = elements * model.num_heads // tp * rank.compute_bytes
    keys_values = 2 * elements * kv_heads * rank.compute_bytes
    if rank.exchange == "all_gather":
        yield Row("keys and values", "cp", "all_gather", forward, keys_values * cp)
        yield Row("their gradients", "cp", "reduce_scatter", backward, keys_values * cp)
    elif rank.exchange == "ulysses":
        copied = keys_values * max(1, cp // kv_heads)
        calls = forward + backward
        yield Row("queries, keys, values", "cp", "all_to_all", calls, queries + copied)
        yield Row("attention's output", "cp", "all_to_all", calls, queries)
    else:
        calls = (forward + backward) * (cp - 1)
        sums = keys_values // rank.compute_bytes * max(4, rank.compute_bytes)
        for direction, step in (("send", 1), ("recv", -1)):
            peer = (rank.coordinate.cp + step) % cp
            yield Row("keys and values", "cp", direction, calls, keys_values, peer)
            yield Row("their gradients", "cp", direction, backward * cp, sums, peer)


def _pipeline(rank: _Rank) -> Iterator[Row]:
    """A message each way for each microbatch and boundary between stages of two ranks."""
    message = rank.activation_bytes // (rank.placement.tp if rank.sequence_parallel else 1)
    for stage in range(rank.last_stage):
        before, after = (rank.schedule.rank_of_stage(n) for n in (stage, stage + 1))
        if before == after:
            continue
        between, m = f"stage {stage} to {stage + 1}", rank.microbatches
        if before == rank.coordinate.pp:
            yield Row(f"hidden, {between}", "pp", "send", m, message, after)
            yield Row(f"gradient, {between}", "pp", "recv", m, message, after)
        if after == rank.coordinate.pp:
            yield Row(f"hidden, {between}", "pp", "recv", m, message, before)
            yield Row(f"gradient, {between}", "pp", "send", m, message, before)


def _data_parallel(rank: _Rank) -> Iterator[Row]:
    """Each unit's parameters gathered as the strategy has it, its gradients reduced once."""
    sharding, master = rank.sharding, rank.master_bytes
    for stage in rank.stages:
        for unit, times in Counter(map(_kind, rank.units(stage))).items():
            what = f"{unit.name} of stage {stage}"
            gathers = _gathers(rank, stage, unit.name) if sharding.split > 1 else {}
            elements = sum(parameter.gathered(sharding.split) for parameter in unit.split)
            for axis, calls in gathers.items() if elements else ():
                bytes_ = elements * rank.compute_bytes
                yield Row(f"{what}, parameters", axis, "all_gather", times * calls, bytes_)
            if elements and sharding.split > 1:
                axis, bytes_ = sharding.split_axis, elements * master
                yield Row(f"{what}, gradients", axis, "reduce_scatter", times, bytes_)
            if elements and sharding.replicas > 1:
                axis, bytes_ = sharding.replica_axis, elements // sharding.split * master
                yield Row(f"{what}, gradients", axis, "all_reduce", times, bytes_)
            if elements and sharding.states_split > sharding.split:
                updated = sum(parameter.gathered(sharding.states_split) for parameter in unit.split)
                bytes_ = updated * master
                yield Row(f"{what}, new weights", sharding.axis, "all_gather", times, bytes_)
            if whole := sum(parameter.gathered(1) for parameter in unit.whole):
                bytes_ = whole * master
                yield Row(f"{what}, whole gradients", sharding.axis, "all_reduce", times, bytes_)


def _kind(unit: PlannedUnit) -> PlannedUnit:
    """The unit without a number: what differs in it alone is communicated alike."""
    return replace(unit, name=unit.name.partition(".")[0])


def _gathers(rank: _Rank, stage: int, unit: str) -> Counter[str]:
    """How often such a unit of a stage is gathered in a step, by axis.

    Between passes a unit's parameters lie split (over the axis that splits them, or after a forward
    over the ranks of dp_reshard), or they are still whole: then nothing is gathered. The backward
    of an embedding of its own needs no weights.
    """
    sharding, order = rank.sharding, rank.order(stage)
    last = [action for action in order if action.kind in GRADIENTS][-1]
    after_forward = {True: sharding.split_axis, False: None}.get(
        sharding.after_forward, "dp_reshard"
    )
    gathers: Counter[str] = Counter()
    split_over: str | None = sharding.split_axis
    for action in order:
        needs = action.kind is Kind.F or (action.kind is not Kind.W and unit != "embedding")
        if needs and split_over is not None:
            gathers[split_over] += 1
        if action.kind is Kind.F:
            split_over = after_forward
        else:
            is_kept = sharding.hold and action != last
            split_over = None if is_kept else sharding.split_axis
    return gathers


def _summands(rank: _Rank) -> Iterator[Row]:
    """Gradients of which ranks have summands, added up on the shards that dp leaves: one message
    for each stage and axis."""
    split = rank.sharding.split
    for axis, what in (
        ("tp", "norms and biases"),
        ("kv", "shared key/value heads"),
        ("embedding", "tied embedding"),
    ):
        for stage in rank.stages:
            elements = 0
            for unit in rank.units(stage):
                for parameters, ranks in ((unit.split, split), (unit.whole, 1)):
                    index = rank.shard_index % ranks
                    elements += sum(p.summand_elements(axis, ranks, index) for p in parameters)
            calls = 1 if elements else 0
            yield Row(what, axis, "all_reduce", calls, elements * rank.master_bytes)


def _muon(rank: _Rank) -> Iterator[Row]:
    """The momenta of each bucket of matrices to their owners, and what becomes of them back."""
    config, sharding, tp = rank.config, rank.sharding, rank.placement.tp
    if config.optimizer.name != "muon":
        return
    matrices = [
        replace(matrix, cuts=sharding.states_split)
        if is_split(config, f"layers.{layer}.{parameter.module}")
        else matrix
        for stage in rank.stages
        for layer in rank.layers[stage]
        for parameter in rank.share.layer()
        for matrix in parameter.matrices
    ]
    holders = Holders(dp=sharding.ranks, tp=tp)
    me = rank.shard_index * tp + rank.coordinate.tp
    axis = "stage"
    if min(sharding.ranks, tp) == 1:
        axis = "tp" if tp > 1 else sharding.axis
    for numbers in deal(matrices, holders):
        bucket = [matrices[number] for number in numbers]
        to_owners, _ = splits(bucket, holders, me, gather=True)
        _, back = splits(bucket, holders, me, gather=False)
        for what, sent in (("momenta", to_owners), ("updates", back)):
            yield Row(f"Muon, {what}", axis, "all_to_all", 1, sum(sent) * rank.master_bytes)
