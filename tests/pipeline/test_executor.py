"""The executor does what the program says: in that order, holding no more than it promised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megagrid.config.schema import Config
from megagrid.data import Loader, Sampler, SyntheticDataset
from megagrid.grid.grid import build_grid
from megagrid.grid.placement import Placement
from megagrid.pipeline import executor as executor_module
from megagrid.pipeline.executor import SENDS_UNDER_WAY
from megagrid.pipeline.schedules import Kind, Program, verify
from megagrid.pipeline.stage import Stage
from megagrid.train.build import Engine, build_engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import compute_gradients, evaluate


@dataclass(frozen=True)
class Setting:
    """A pipeline and its schedule."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}-pp{self.ranks}-m{self.microbatches}"

    @property
    def config(self) -> Config:
        return Config(
            model={
                "num_layers": max(4, self.ranks * self.chunks),
                "hidden_size": 16,
                "ffn_hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 4,
                "vocab_size": 61,
                "max_seq_length": 8,
                "tied_embeddings": True,
            },
            parallel={
                "pipeline_parallel_size": self.ranks,
                "pipeline_schedule": self.schedule,
                "virtual_pipeline_size": self.chunks,
            },
            train={
                "seq_length": 8,
                "micro_batch_size": 1,
                "global_batch_size": self.microbatches,
                "steps": 1,
                "device": "cpu",
            },
            data={"paths": ["synthetic"]},
            logging={"run_dir": "unused"},
        )


SETTINGS = [
    Setting("GPipe", 2, 4),
    Setting("1F1B", 1, 3),
    Setting("1F1B", 2, 9),
    Setting("1F1B", 4, 8),
    Setting("1F1B", 4, 2),
    Setting("GPipe", 4, 3),
    Setting("Interleaved1F1B", 2, 4, chunks=2),
    Setting("ZB1P", 2, 5),
    Setting("ZBV", 2, 4, chunks=2),
]


def engine_of(setting: Setting) -> Engine:
    placement = Placement(pp=setting.ranks)
    config = setting.config
    return build_engine(config, build_grid(placement, dist.get_rank(), "cpu", 2))


def batches_of(engine: Engine) -> list:
    train = engine.config.train
    data = SyntheticDataset(engine.config.model.vocab_size, train.seq_length, seed=1)
    return Loader(data, Sampler(train.global_batch_size, 1, 1), dp_rank=0).step(0)


def run_step(engine: Engine) -> None:
    compute_gradients(engine, batches_of(engine), 1, Stopwatch())


@contextmanager
def watching(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Call `note(result, *args)` after each call of a function."""
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        result = original(*args, **kwargs)
        note(result, *args)
        return result

    with patch.object(owner, name, watched):
        yield


# ------------------------------------------------------------------------------------------------
# Order


def actions_on_rank(setting: Setting) -> tuple[list[str], list[str]]:
    """What the rank's program says, and what was really done, in order."""
    engine = engine_of(setting)
    program, rank = engine.training, engine.grid.pp.rank
    done: list[str] = []
    calls = {
        "_forward": Kind.F,
        "_backward": Kind.B,
        "_backward_input": Kind.I,
        "_backward_weight": Kind.W,
        "_reduce_grad": Kind.REDUCE_GRAD,
        "_reduce_tied": Kind.REDUCE_TIED,
    }
    runner = engine.executor
    for name, kind in calls.items():
        original = getattr(runner, name)

        def watched(step, action, original=original):
            original(step, action)
            done.append(str(action))

        runner._run_action[kind] = watched

    def posted(_, messages, axis) -> None:
        done.append(" ".join(f"{'to' if m.is_send else 'from'} {m.peer}" for m in messages))

    with watching(executor_module, "post", posted):
        run_step(engine)
    return [in_words(program, step) for step in program.steps[rank]], done


def in_words(program: Program, step) -> str:
    if not step.is_batch:
        return str(step.action)
    directions = {Kind.SEND_F: "to", Kind.SEND_B: "to", Kind.RECV_F: "from", Kind.RECV_B: "from"}
    return " ".join(f"{directions[a.kind]} {program.peer(a)}" for a in step.batch)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_ranks_do_what_their_programs_say_in_that_order(ranks, setting):
    for said, done in ranks.run(actions_on_rank, setting, world_size=setting.ranks):
        assert done == said


# ------------------------------------------------------------------------------------------------
# Memory


class _Mark(torch.autograd.Function):
    """Identity. Its place in the graph holds `token`, which dies with the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: object) -> torch.Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Token:
    """Something a weak reference can point to."""


def held_on_rank(setting: Setting) -> tuple[int, int, int, int, int]:
    """Most activations held: counted by the stages, and as graphs that are alive; what verify says;
    and both counts after the step."""
    engine = engine_of(setting)
    stages = list(engine.executor.stages.values())
    tokens: list[weakref.ref] = []
    peak_counted = peak_alive = 0

    def alive() -> int:
        return sum(token() is not None for token in tokens)

    def mark(module, args, output):
        token = _Token()
        tokens.append(weakref.ref(token))
        return _Mark.apply(output, token)

    def after_forward(*_) -> None:
        nonlocal peak_counted, peak_alive
        peak_counted = max(peak_counted, sum(stage.in_flight for stage in stages))
        peak_alive = max(peak_alive, alive())

    for stage in stages:
        stage.module.register_forward_hook(mark)
    with watching(Stage, "forward", after_forward):
        run_step(engine)
    report = verify(engine.training)
    rank = engine.grid.pp.rank
    # Graphs end with the input's gradient; what a W needs of them is held apart.
    assert peak_alive == report.in_flight_until_input_grad[rank]
    left = sum(stage.in_flight for stage in stages)
    return peak_counted, report.in_flight[rank], engine.training.max_in_flight[rank], left, alive()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_activations_held_are_those_that_verify_counts(ranks, setting):
    for counted, verified, promised, left, alive in ranks.run(
        held_on_rank, setting, world_size=setting.ranks
    ):
        assert counted == verified <= promised
        assert (left, alive) == (0, 0)


def sends_on_rank(setting: Setting) -> tuple[int, int, int]:
    """Messages sent, most sent tensors alive at a time, and alive after the step."""
    engine = engine_of(setting)
    sent: list[weakref.ref] = []
    peak = 0

    def note(pending, messages, axis) -> None:
        nonlocal peak
        sent.extend(weakref.ref(message.tensor) for message in messages if message.is_send)
        peak = max(peak, sum(tensor() is not None for tensor in sent))

    with watching(executor_module, "post", note):
        run_step(engine)
    gc.collect()
    return len(sent), peak, sum(tensor() is not None for tensor in sent)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_sent_tensors_are_let_go_of_during_the_step(ranks, schedule):
    setting = Setting(schedule, 2, 16)
    # A batch may add two to what was under way before it.
    bound = SENDS_UNDER_WAY * setting.ranks + 2
    for sent, peak, after in ranks.run(sends_on_rank, setting, world_size=2):
        assert sent == 16
        assert peak <= bound
        assert after == 0


# ------------------------------------------------------------------------------------------------
# Evaluation


def evaluation_on_rank(setting: Setting) -> tuple[float, int, bool]:
    engine = engine_of(setting)
    stages = engine.executor.stages.values()
    in_flight = 0

    def after_forward(*_) -> None:
        nonlocal in_flight
        in_flight = max(in_flight, *(stage.in_flight for stage in stages))

    with watching(Stage, "forward", after_forward):
        loss = evaluate(engine, [batches_of(engine)])
    return loss, in_flight, any(shard.grad is not None for shard in engine.shards)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_evaluation_holds_nothing_and_leaves_no_gradient(ranks, setting):
    alone = Setting("1F1B", 1, setting.microbatches, setting.chunks)
    (expected,) = ranks.run(
        training_loss_on_rank, setting.config.model.num_layers, alone, world_size=1
    )
    for loss, in_flight, has_gradient in ranks.run(
        evaluation_on_rank, setting, world_size=setting.ranks
    ):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert in_flight == 0
        assert not has_gradient


def training_loss_on_rank(num_layers: int, alone: Setting) -> float:
    """The loss of the same samples as a training step of one process has it."""
    config = alone.config
    model = config.model.model_copy(update={"num_layers": num_layers})
    parallel = config.parallel.model_copy(update={"virtual_pipeline_size": 1})
    config = config.model_copy(update={"model": model, "parallel": parallel})
    engine = build_engine(config, build_grid(Placement(), 0, "cpu", 2))
    return compute_gradients(engine, batches_of(engine), 1, Stopwatch()).loss
