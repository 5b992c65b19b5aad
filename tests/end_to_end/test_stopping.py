"""A signal to any one rank stops all of them after one step, which is saved, and nothing is lost.

Row C18 of the faults that other trainers have had. As processes, with launcher and exit codes, in
`test_processes`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from megagrid.checkpoint.files import ChecksummedFile
from megagrid.exit_codes import STOPPED
from megagrid.train import attempt, saving
from megagrid.train import run as run_module
from megagrid.train.run import Run
from megagrid.train.stopping import SIGNALS
from tests.end_to_end.t0 import (
    ALONE,
    DP2,
    DROPOUT,
    GPT,
    PP2,
    TP2,
    TP2PP2,
    Training,
    computed,
    differing,
    merged,
)

UNSAVED = {"checkpoint": {"save_at_end": False}}
"""Unless a signal asks for it."""

ASYNC = {"checkpoint": {"async_save": True}}

MODULES = {"attempt": attempt, "run": run_module, "saving": saving}


@dataclass(frozen=True)
class SignalAt:
    """A signal that a rank is sent at the beginning of a call of a function, its `call`-th."""

    function: str
    call: int
    rank: int = -1
    number: signal.Signals = signal.SIGTERM
    module: str = "attempt"

    @contextmanager
    def __call__(self, run: Run) -> Iterator[None]:
        module = MODULES[self.module]
        function: Callable = getattr(module, self.function)
        is_hit = run.grid.rank == self.rank % run.grid.world.size
        calls = 0

        def interrupted(*args, **keys):
            nonlocal calls
            calls += 1
            if is_hit and calls == self.call:
                os.kill(os.getpid(), self.number)
            return function(*args, **keys)

        with patch.object(module, self.function, interrupted):
            yield


SAVING = SignalAt("save_checkpoint", 1, module="saving")
"""In the run's first save."""


@dataclass(frozen=True)
class RunWith:
    """Train, and get signals on the way; returns the exit code."""

    signals: tuple[SignalAt, ...]

    def __call__(self, run: Run) -> int:
        with run._stop.by_signals():
            return self._run(run, self.signals)

    def _run(self, run: Run, signals: tuple[SignalAt, ...]) -> int:
        if not signals:
            return run.run()
        with signals[0](run):
            return self._run(run, signals[1:])


def run_with(*signals: SignalAt) -> RunWith:
    return RunWith(signals)


def codes(training: Training) -> set[int]:
    """What the ranks exit with."""
    return {report.result for report in training.ranks}


@pytest.mark.parametrize(
    ("placement", "rank", "number", "mode"),
    [
        (ALONE, 0, signal.SIGTERM, {}),
        (ALONE, 0, signal.SIGUSR1, ASYNC),
        (DP2, 1, signal.SIGTERM, ASYNC),
        (TP2PP2, 0, signal.SIGTERM, ASYNC),
        (TP2PP2, 3, signal.SIGUSR1, {}),
    ],
    ids=["alone", "alone-behind", "dp2-behind", "tp2pp2-behind", "tp2pp2"],
)
def test_a_signal_to_one_rank_saves_the_same_step_everywhere(
    trainer, placement, rank, number, mode
):
    keys = merged(GPT, DROPOUT)
    work = run_with(SignalAt("compute_gradients", 3, rank, number))
    stopped = trainer.train(placement, keys, UNSAVED, mode, work=work)
    assert codes(stopped) == {STOPPED}
    assert [record.step for record in stopped.records] == [1, 2, 3]
    assert stopped.saved_steps == [3]
    last = stopped.ranks[0].output.splitlines()[-1]
    assert last == (
        "a signal has asked the run to stop: it is saved after step 3 of 8; go on with "
        "checkpoint.resume=latest"
    )


def test_a_stopped_run_goes_on_as_if_it_had_not_been(trainer):
    keys = merged(GPT, DROPOUT)
    whole = trainer.train(DP2, keys)
    work = run_with(SignalAt("compute_gradients", 5))
    stopped = trainer.train(DP2, keys, work=work)
    folder = {"logging": {"run_dir": str(stopped.folder)}}
    rest = trainer.train(DP2, keys, folder, {"checkpoint": {"resume": "latest"}})
    assert computed(rest.records) == computed(whole.records)
    assert differing(rest.tensors(8), whole.tensors(8)) == []


@pytest.mark.parametrize(
    ("signals", "step", "mode"),
    [
        # Behind the first step's numbers, in which it would have told the others.
        ([SignalAt("apply_gradients", 1)], 2, {}),
        ([SignalAt("evaluate", 1, rank=0, module="run")], 3, {}),
        ([SAVING], 4, {}),
        ([SignalAt("compute_gradients", 2, n) for n in (0, 1)], 2, ASYNC),
        ([SignalAt("compute_gradients", 2), SAVING], 2, {}),
        ([SignalAt("compute_gradients", 2), SAVING], 2, ASYNC),
        ([SignalAt("compute_gradients", 2, number=n) for n in SIGNALS], 2, {}),
    ],
    ids=[
        "update",
        "evaluation",
        "save",
        "both ranks",
        "again in its save",
        "again in its save behind",
        "both signals",
    ],
)
def test_a_signal_at_any_other_time_waits_for_the_next_step(trainer, signals, step, mode):
    keys = {
        "evaluation": {"interval": 2, "batches": 1},
        "data": {"paths": ["synthetic:400"], "valid_fraction": 0.1},
        "checkpoint": {"save_interval": 3},
    }
    stopped = trainer.train(PP2, keys, mode, work=run_with(*signals))
    assert codes(stopped) == {STOPPED}
    assert [record.step for record in stopped.records] == list(range(1, step + 1))
    assert stopped.saved_steps == [n for n in range(1, step + 1) if n in (3, step)]


def ask_and_run(run: Run) -> int:
    """A request that was made while the run was built, and resumed."""
    if run.grid.rank == 0:
        run._stop.make()
    return run.run()


def test_a_request_before_the_first_step_is_met_after_it(trainer):
    stopped = trainer.train(TP2, UNSAVED, work=ask_and_run)
    assert codes(stopped) == {STOPPED}
    assert stopped.saved_steps == [1]
    folder = {"logging": {"run_dir": str(stopped.folder)}}
    resume = {"checkpoint": {"resume": "latest"}}
    again = trainer.train(TP2, UNSAVED, folder, resume, work=ask_and_run)
    assert codes(again) == {STOPPED}
    assert again.saved_steps == [1, 2]


def test_a_run_that_is_asked_in_its_last_step_is_done(trainer):
    """And saved, though the recipe wouldn't have."""
    done = trainer.train(TP2, UNSAVED, work=run_with(SignalAt("compute_gradients", 8)))
    assert codes(done) == {0}
    assert done.saved_steps == [8]
    assert "a signal" not in done.ranks[0].output


def run_with_a_full_disk(run: Run) -> int:
    """Every save fails, and a signal comes."""

    def fail(file: ChecksummedFile, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device", str(file.path))

    with patch.object(ChecksummedFile, "write", fail):
        return run_with(SignalAt("compute_gradients", 3))(run)


@pytest.mark.parametrize(
    ("policy", "mode"), [("end", ASYNC), ("continue", {}), ("continue", ASYNC)]
)
def test_a_run_that_stops_unsaved_says_so_and_nothing_else(trainer, policy, mode):
    keys = {"checkpoint": {"on_failed_save": policy}}
    ended = trainer.attempt(DP2, keys, mode, work=run_with_a_full_disk)
    (error,) = ended.errors
    assert error.startswith(f"CheckpointError: saving {ended.checkpoint(3)} failed on rank 0")
    assert ended.saved_steps == []
    assert "a signal" not in ended.ranks[0].output
    assert len(ended.records) == 3


def handlers_in_and_after_the_block(run: Run) -> list[bool]:
    """Whether signals are taken for requests."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with run._stop.by_signals():
        inside = [signal.getsignal(number) for number in SIGNALS]
    after = [signal.getsignal(number) for number in SIGNALS]
    return [before == after, before != inside, run._stop.is_made]


def test_outside_the_run_signals_do_what_they_did(trainer):
    (report,) = trainer.train(ALONE, work=handlers_in_and_after_the_block).ranks
    assert report.result == [True, True, False]
