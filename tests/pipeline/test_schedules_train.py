"""Whatever the schedule, a step is that of one process: losses, norms, every gradient and weight.

Eight layers, so that four ranks may have two stages each. A global batch of 8, 18 or 35 samples is
cut into 1 to 9 microbatches; all its cuts are held against the same batch on one process.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrid.cli import main
from megagrid.grid.placement import Placement
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import Costs, Kind, Schedule, generate, save, simulate
from megagrid.pipeline.stage import Stage
from megagrid.train import command
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import compute_gradients, evaluate
from tests.config import recipe
from tests.equivalence.case import SP, TIED, Case, Keys, Variant, schedule, strategy
from tests.equivalence.trainer import batches_of, engine_of, rank_grid
from tests.pipeline.schedules.random_schedules import schedules

SCHEDULES: dict[str, Keys] = {
    name: (schedule(name), ("parallel.virtual_pipeline_size", chunks))
    for name, chunks in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZB1P", 1), ("ZBV", 2))
}

CUTS = {8: (8, 4, 2, 1), 18: (6, 3, 2), 35: (7, 5)}
"""Global batch -> sizes of its microbatches: together 1 to 9 of them."""

SHORT: Keys = (("model.num_layers", 8), ("train.seq_length", 16))


def variant(batch: int = 8, *keys, family: str = "llama", precision: str = "fp32") -> Variant:
    """Two steps: the second one's loss and norm are those of updated weights."""
    return Variant(
        family, precision, steps=2, keys=(*SHORT, ("train.global_batch_size", batch), *keys)
    )


def cases_of(name: str, placement: Placement, *keys) -> list[Case]:
    """1 to 9 microbatches."""
    return [
        Case(variant(batch, *keys), placement, micro_batch, SCHEDULES[name])
        for batch, micro_batches in CUTS.items()
        for micro_batch in micro_batches
    ]


# ------------------------------------------------------------------------------------------------
# Equivalence


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("pp", "keys"),
    [
        pytest.param(2, (), id="pp2-untied"),
        pytest.param(2, (TIED,), id="pp2-tied", marks=pytest.mark.slow),
        pytest.param(4, (), id="pp4-untied", marks=pytest.mark.slow),
        pytest.param(4, (TIED,), id="pp4-tied", marks=pytest.mark.slow),
    ],
)
def test_one_to_nine_microbatches_train_like_one_process(equivalence, pp, keys, name):
    equivalence.check(cases_of(name, Placement(pp=pp), *keys))


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_deviations_vanish_in_fp64(equivalence, pp):
    """They are roundings: with 29 more bits nothing of them is left."""
    exact = variant(8, TIED, precision="fp64")
    equivalence.check([Case(exact, Placement(pp=pp), 1, keys) for keys in SCHEDULES.values()])


def test_tensor_and_sequence_parallel_stages(equivalence):
    """Hidden states travel whole, and in shards of the sequence."""
    equivalence.check(
        [
            Case(variant(8, TIED), Placement(tp=2, pp=2), 2, (*keys, *sequence_parallel))
            for keys, sequence_parallel in product(SCHEDULES.values(), [(), (SP,)])
        ]
    )


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_data_parallel_stages_under_each_strategy(equivalence, sharding):
    equivalence.check(
        [
            Case(variant(8, TIED), Placement(pp=2, dp=2), 1, (*keys, strategy(sharding)))
            for keys in SCHEDULES.values()
        ]
    )


@pytest.mark.slow
def test_all_axes(equivalence):
    grid = Placement(tp=2, pp=2, dp=2)
    equivalence.check([Case(variant(8, TIED), grid, 1, (*k, SP)) for k in SCHEDULES.values()])


def test_dropout_takes_the_masks_of_one_process(equivalence):
    dropped = variant(
        8,
        TIED,
        ("model.dropout", 0.1),
        ("model.attention_dropout", 0.1),
        family="gpt",
    )
    equivalence.check([Case(dropped, Placement(pp=2), 2, keys) for keys in SCHEDULES.values()])


@pytest.mark.slow
def test_bf16_stages_differ_from_one_process_by_roundings(equivalence):
    coarse = variant(8, precision="bf16")
    equivalence.check([Case(coarse, Placement(pp=2), 1, keys) for keys in SCHEDULES.values()])


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("1F1B", [8, 0]),
        ("ZB1P", [0, 8]),
        ("Interleaved1F1B", [4, 0, 4, 0]),
        ("ZBV", [0, 8, 0, 0]),
    ],
)
def test_stages_without_layers(equivalence, name, counts):
    keys = (*SCHEDULES[name], ("parallel.layers_per_stage", counts))
    equivalence.check([Case(variant(8, TIED), Placement(pp=2), 2, keys)])


# ------------------------------------------------------------------------------------------------
# Planted faults, which the comparison must see


@contextmanager
def one_late_gradient_lost(engine: Engine):
    """The last stage forgets a weight gradient of microbatch 2, the first one put off."""
    original = Stage.backward_weight

    def backward_weight(stage, number, *, is_last):
        if stage.is_last and number == 2:
            stage._late[number]._late.pop(0)
        original(stage, number, is_last=is_last)

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


@contextmanager
def tied_ends_of_a_rank_not_summed(engine: Engine):
    with patch.object(Stage, "tied_summands", lambda stage: []):
        yield


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("ZB1P", one_late_gradient_lost, r"gradient off by .* head\.weight"),
        ("ZBV", one_late_gradient_lost, r"gradient off by .* head\.weight"),
        ("ZBV", tied_ends_of_a_rank_not_summed, r"embedding\.weight .* differ between"),
    ],
)
def test_a_planted_fault_is_found(equivalence, name, fault, told):
    keys = [TIED] if fault is tied_ends_of_a_rank_not_summed else []
    case = Case(variant(8, *keys), Placement(pp=2), 2, SCHEDULES[name])
    with pytest.raises(AssertionError, match=told):
        equivalence.check([case], fault)


# ------------------------------------------------------------------------------------------------
# Accumulation in bf16


def accumulated_norms(case: Case, microbatches: int) -> list[float]:
    """Norm of one microbatch's gradient, and of the mean of so many copies of it."""
    norms = []
    for count in (1, microbatches):
        samples = count * case.placement.dp
        sized = replace(case, variant=case.variant.having(("train.global_batch_size", samples)))
        engine = engine_of(sized, rank_grid(case.placement, num_kv_heads=2))
        batch = batches_of(engine, 1)[0]
        result = compute_gradients(engine, [batch] * count, 1, Stopwatch())
        norms.append(result.grad_norm)
    return norms


@pytest.mark.parametrize("name", ["1F1B", "ZB1P"])
@pytest.mark.parametrize("dp", [1, 2])
def test_64_bf16_microbatches_add_up_in_fp32(ranks, name, dp):
    """In bf16, 256 + 1 is 256; weight gradients that come late are no exception."""
    case = Case(variant(8, precision="bf16"), Placement(pp=2, dp=dp), 1, SCHEDULES[name])
    for one, many in ranks.run(accumulated_norms, case, 64, world_size=2 * dp):
        assert many == pytest.approx(one, rel=1e-3)


# ------------------------------------------------------------------------------------------------
# Evaluation


def evaluation_loss(cases: Sequence[Case]) -> list[float]:
    """Of two global batches, for each of the cases."""
    losses = []
    for case in cases:
        grid = rank_grid(case.placement, 2, ends_of(case))
        engine = engine_of(case, grid)
        losses.append(evaluate(engine, [batches_of(engine, step) for step in (1, 2)]))
    return losses


def ends_of(case: Case) -> tuple[int, int]:
    """The pipeline ranks of the first and the last stage."""
    stages = training_program(case.config, case.placement).placement
    return stages[0], stages[-1]


@pytest.mark.parametrize("pp", [2, 4])
def test_evaluation_runs_through_the_stages_of_every_schedule(ranks, pp):
    alone = Case(variant(8, TIED), micro_batch=8)
    ((expected,),) = ranks.run(evaluation_loss, [alone], world_size=1)
    cases = [Case(variant(8, TIED), Placement(pp=pp), 1, keys) for keys in SCHEDULES.values()]
    for losses in ranks.run(evaluation_loss, cases, world_size=pp):
        assert losses == pytest.approx([expected] * len(cases), abs=1e-5)


# ------------------------------------------------------------------------------------------------
# From a file


def from_file(path: Path, placed: Schedule) -> Keys:
    """The keys of a run of the schedule in a file."""
    chunks = placed.num_stages // placed.num_ranks
    return (
        ("parallel.pipeline_schedule_file", str(path)),
        ("parallel.virtual_pipeline_size", chunks),
    )


def test_a_schedule_edited_by_hand_trains_like_one_process(equivalence, tmp_path):
    """ZB1P whose rank 0 puts its first weight gradient off to the end, and holds one more."""
    path = tmp_path / "mine.txt"
    written = generate("ZB1P", 2, 4)
    save(written, path)
    text = path.read_text()
    edited = re.sub(r"^(rank 0: .*)0W0 (.*)$", r"\1\2 0W0", text, flags=re.MULTILINE)
    edited = edited.replace("max_in_flight: 2 2", "max_in_flight: 3 2")
    assert edited.count("0W0") == 1 and edited != text
    path.write_text(edited)
    equivalence.check([Case(variant(), Placement(pp=2), 2, from_file(path, written))])


def test_a_broken_file_is_drawn_and_refused_before_ranks_start(tmp_path, monkeypatch, capsys):
    path = tmp_path / "broken.txt"
    save(generate("1F1B", 2, 2), path)
    path.write_text(path.read_text().replace("1F0 1B0", "1B0 1F0"))
    keys = [
        f"parallel.pipeline_schedule_file={path}",
        "parallel.pipeline_parallel_size=2",
        "train.global_batch_size=2",
    ]

    def start_ranks(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(command, "start_ranks", start_ranks)
    assert main(["train", str(recipe.write(tmp_path)), *keys]) == 2
    *drawing, error = capsys.readouterr().err.splitlines()
    assert drawing == ["  rank 0: 0F0    0F1  0B0  0B1", "  rank 1: ▶1B0◀  1F0  1F1  1B1"]
    assert error.startswith(
        f'error: parallel.pipeline_schedule_file="{path}": 1F1B breaks the rule of data '
        "dependencies: 1B0 comes before 1F0"
    )


SIZES = {
    2: st.tuples(st.sampled_from([2, 4]), st.just(2), st.sampled_from([1, 2, 4])),
    4: st.tuples(st.sampled_from([4, 8]), st.just(4), st.sampled_from([1, 2, 4])),
}
"""Ranks -> (stages, ranks, microbatches), such that 8 layers and 8 samples make them."""


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_legal_schedules_train_like_one_process(equivalence, tmp_path, pp):
    """Stages on any rank, whole backwards beside split ones, in any order that can run."""

    @settings(
        deadline=None,
        max_examples=6,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(schedules(sizes=SIZES[pp]), min_size=4, max_size=4), st.booleans())
    def check(drawn, tied):
        cases = []
        for number, random in enumerate(drawn):
            path = tmp_path / f"{number}.txt"
            save(random, path)
            micro_batch = 8 // random.num_microbatches
            model = variant(8, *([TIED] if tied else []))
            cases.append(Case(model, Placement(pp=pp), micro_batch, from_file(path, random)))
        equivalence.check(cases)

    check()


# ------------------------------------------------------------------------------------------------
# Memory


@dataclass(eq=False)
class Saved:
    """A tensor that the graph keeps; dies with that part of the graph."""

    tensor: torch.Tensor


class Held:
    """Bytes that a rank's stages hold for backwards to come: what graphs have saved, and the
    factors of weight gradients put off. Parameters don't count, storages once for a microbatch."""

    def __init__(self, engine: Engine) -> None:
        self._stages = engine.executor.stages
        self._parameters = {
            parameter.untyped_storage().data_ptr()
            for stage in self._stages.values()
            for parameter in stage.module.parameters()
        }
        self._saved: dict[tuple[int, int], weakref.WeakSet[Saved]] = defaultdict(weakref.WeakSet)

    @contextmanager
    def saving(self, stage: int, microbatch: int):
        """Watch what the forward in the block saves."""

        def pack(tensor):
            saved = Saved(tensor)
            self._saved[stage, microbatch].add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield

    def bytes(self, stage: int, microbatch: int) -> int:
        """Of one activation."""
        tensors = [saved.tensor for saved in self._saved.get((stage, microbatch), ())]
        late = self._stages[stage]._late.get(microbatch)
        for product_to_come in late._late if late else ():
            tensors += [product_to_come.x, product_to_come.grad]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for at, size in storages.items() if at not in self._parameters)

    def total(self) -> int:
        return sum(self.bytes(*key) for key in {*self._saved})


def memory_of_a_step(case: Case) -> tuple[int, int, dict[Kind, dict[int, int]]]:
    """The most that this rank held, what it held in the end, and of one microbatch what each of its
    stages holds after F and after I."""
    engine = engine_of(case, rank_grid(case.placement, 2, ends_of(case)))
    held = Held(engine)
    numbers = {id(stage): number for number, stage in engine.executor.stages.items()}
    after: dict[Kind, dict[int, int]] = {Kind.F: {}, Kind.I: {}}
    peak = 0
    forward, backward_input = Stage.forward, Stage.backward_input

    def watched_forward(stage, microbatch, *arguments):
        nonlocal peak
        number = numbers[id(stage)]
        with held.saving(number, microbatch):
            output = forward(stage, microbatch, *arguments)
        after[Kind.F].setdefault(number, held.bytes(number, microbatch))
        peak = max(peak, held.total())
        return output

    def watched_backward_input(stage, microbatch, grad):
        input_grad = backward_input(stage, microbatch, grad)
        number = numbers[id(stage)]
        after[Kind.I].setdefault(number, held.bytes(number, microbatch))
        return input_grad

    with (
        patch.object(Stage, "forward", watched_forward),
        patch.object(Stage, "backward_input", watched_backward_input),
    ):
        compute_gradients(engine, batches_of(engine, 1), 1, Stopwatch())
    return peak, held.total(), after


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulator_s_peak_memory_is_that_of_a_real_step(ranks, name):
    """Given what one activation takes, before and after its I. That I frees part of it, and W or B
    the rest, is in the equality."""
    case = Case(variant(), Placement(pp=2), 1, SCHEDULES[name])
    program = training_program(case.config, case.placement)
    found = ranks.run(memory_of_a_step, case, world_size=2)
    of_stage: dict[Kind, dict[int, int]] = {Kind.F: {}, Kind.I: {}}
    for _, _, after in found:
        for kind, sizes in after.items():
            of_stage[kind] |= sizes
    stages = range(program.num_stages)
    activation = [of_stage[Kind.F][stage] for stage in stages]
    for_weight = [of_stage[Kind.I].get(stage, 0) for stage in stages]
    costs = Costs.of(program.num_stages, activation=activation, weight_activation=for_weight)
    assert [peak for peak, _, _ in found] == list(simulate(program, costs).peak_memory)
    assert [left for _, left, _ in found] == [0, 0]
    assert all(late < whole for late, whole in zip(for_weight, activation, strict=True))
