"""Ranks that stop, hang or are slow, as processes: the others end within a bound and name them.

Row E6 of the faults that other trainers have had.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megagrid.health.beat import DONE, LEFT_ALONE, Beat, read_beats
from megagrid.train.metrics import read_records
from megagrid.train.status import status_of
from tests.end_to_end.t0 import DP2, TP2, TP2PP2
from tests.end_to_end.test_processes import Job

TIMEOUT_S = 3.0

SHORT = {"train": {"timeout_seconds": TIMEOUT_S}}
ENDLESS = {"train": {"steps": 10**6, "timeout_seconds": TIMEOUT_S}}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job of ranks that wait for each other no longer than TIMEOUT_S."""
    made: list[Job] = []

    def make(*arguments, **keys) -> Job:
        made.append(Job(tmp_path, *arguments, **keys))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def faulty(ranks: int) -> str:
    """What starts `ranks`, one of which has a fault."""
    return torchrun(ranks, "tests.end_to_end.faulty")


def torchrun(ranks: int, module: str) -> str:
    """What starts `ranks` that run a module."""
    return f"torch.distributed.run --standalone --nproc-per-node {ranks} -m {module}"


def beats(run: Job) -> dict[int, Beat]:
    return read_beats(run.folder / "run")


def verdict(run: Job) -> dict:
    (path,) = (run.folder / "run" / "ranks").glob("verdict-*.json")
    return json.loads(path.read_text())


def told(run: Job) -> str:
    """The verdict as it stands on stderr: once, in a line, without a traceback."""
    errors = (run.folder / "err").read_text()
    (line,) = re.findall(r"^rank .*, longer than .*$", errors, re.MULTILINE)
    assert "lost a peer" not in errors
    assert not re.search(r'^ +File ".*/megagrid/', errors, re.MULTILINE)
    assert line == verdict(run)["line"]
    return line


def test_a_stopped_rank_is_named_and_the_others_end(job):
    """Under torchrun, which takes no notice; megagrid's launcher looks for such ranks itself."""
    stopped = job(TP2PP2, ENDLESS, starter=torchrun(4, "megagrid")).start()
    stopped.wait_for_step(2)
    victim = beats(stopped)[2]
    assert (victim.coordinate.pp, victim.coordinate.tp) == (1, 0)
    os.kill(victim.pid, signal.SIGSTOP)
    stopped.wait_until(lambda: any(beat.end for beat in beats(stopped).values()))
    with contextlib.suppress(ProcessLookupError):  # torchrun would, half a minute later
        os.kill(victim.pid, signal.SIGKILL)
    assert stopped.end().code != 0
    line = told(stopped)
    assert f", longer than train.timeout_seconds={TIMEOUT_S:g}: " in line
    assert f"{victim.who} is stopped or dead, without a beat for " in line
    assert verdict(stopped)["blamed"] == [2]
    assert len(verdict(stopped)["ranks"]) == 4
    assert LEFT_ALONE in {beat.end.how for beat in beats(stopped).values() if beat.end}


@pytest.mark.parametrize(
    ("fault", "placement", "place"),
    [
        ("hang in compute", TP2, "spin"),
        pytest.param("hang in read", DP2, "read_without_end", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_with_the_place_and_ends_too(
    job,
    fault,
    placement,
    place,
):
    hung = job(placement, ENDLESS, starter=faulty(2)).start(FAULT=fault, FAULTY_RANK="1")
    assert hung.end().code != 0
    who = beats(hung)[1].who
    assert f"{who} is alive but is in {place} (tests/end_to_end/faulty.py:" in told(hung)
    assert {beat.end.how for beat in beats(hung).values()} == {LEFT_ALONE}
    assert verdict(hung)["blamed"] == [1]


@pytest.mark.gpu
def test_a_rank_that_hangs_on_an_accelerator_is_named_too(job):
    """Its peers wait for their devices, which wait for messages."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators: NCCL gives each rank one of its own")
    device = torch.accelerator.current_accelerator().type
    hung = job(DP2, ENDLESS, starter=faulty(2))
    ended = hung.start(f"train.device={device}", FAULT="hang in compute", FAULTY_RANK="1").end()
    assert ended.code != 0
    assert f"{beats(hung)[1].who} is alive but is in spin (" in told(hung)


def test_ranks_wait_for_an_index_that_the_first_one_builds(job):
    """E6."""
    waiting = job(DP2, SHORT, starter=faulty(2)).start(FAULT="slow index", FAULTY_RANK="0")
    assert waiting.end().code == 0
    assert [r.step for r in read_records(waiting.folder / "run" / "metrics.jsonl")][-1] == 8
    assert {beat.end.how for beat in beats(waiting).values()} == {DONE}


def test_a_slow_host_is_named_while_the_run_goes_on_and_in_its_status(job):
    slow = job(DP2, {"train": {"steps": 16}}, starter=faulty(2))
    ended = slow.start("logging.beat_seconds=0.3", FAULT="slow host", FAULTY_RANK="1").end()
    assert ended.code == 0
    (line,) = re.findall(r"^slow: .*$", ended.out, re.MULTILINE)
    assert line.startswith(f"slow: {beats(slow)[1].who} computes for 0.")
    last = beats(slow)
    assert last[1].compute_s > 1.5 * last[0].compute_s
    assert last[1].compute_s <= last[1].step_s
    assert status_of(slow.folder / "run", time.time()).health == "done"
