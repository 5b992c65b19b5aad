"""Whatever wandb does, the run goes on, ends, and says so once."""

import os
import subprocess
import sys
import threading
import types

import pytest

from megagrid.config.schema import LoggingConfig
from megagrid.grid.bootstrap import Job
from megagrid.train.tracking import LARGEST_BACKLOG, WandbTracker, to_wandb, wandb_run_id
from tests.train.test_metrics import record


class FakeWandb(types.ModuleType):
    """Records what it is told; `faults` maps a call's name to what it raises."""

    def __init__(self, **faults: BaseException) -> None:
        super().__init__("wandb")
        self.faults = faults
        self.logged: list[dict] = []
        self.options: dict = {}
        self.summary: dict = {}
        self.is_finished = False

    def init(self, **options):
        self._fail("init")
        self.options = options
        return self

    def define_metric(self, name, step_metric=None):
        self._fail("define_metric")

    def log(self, numbers, step=None):
        assert step is None, "wandb drops a step below its last one"
        self._fail("log")
        self.logged.append(numbers)

    def finish(self):
        self._fail("finish")
        self.is_finished = True

    def _fail(self, call):
        if call in self.faults:
            raise self.faults[call]


@pytest.fixture
def logging(tmp_path):
    return LoggingConfig(run_dir=str(tmp_path), wandb="offline", wandb_name="a name")


def track(monkeypatch, logging, wandb, steps=range(1, 8), **options) -> list[str]:
    """Track `steps`; the warnings that came of it."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    warnings: list[str] = []
    tracker = WandbTracker(logging, {"model": "tiny"}, "id", warn=warnings.append, **options)
    for step in steps:
        tracker.write(record(step))
    tracker.close()
    return warnings


def test_every_record_is_logged_under_its_step(monkeypatch, logging):
    wandb = FakeWandb()
    assert track(monkeypatch, logging, wandb) == []
    assert [numbers["step"] for numbers in wandb.logged] == list(range(1, 8))
    assert wandb.is_finished
    assert (wandb.options["mode"], wandb.options["name"]) == ("offline", "a name")
    assert wandb.options["config"] == {"model": "tiny"}


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "finish"])
@pytest.mark.parametrize(
    "fault", [RuntimeError("no\nnetwork."), SystemExit(1), KeyboardInterrupt()]
)
def test_a_fault_in_any_call_is_one_warning(monkeypatch, logging, call, fault):
    warnings = track(monkeypatch, logging, FakeWandb(**{call: fault}))
    assert len(warnings) == 1
    assert type(fault).__name__ in warnings[0]
    assert "\n" not in warnings[0]


def test_a_missing_wandb_is_one_warning(monkeypatch, logging):
    (warning,) = track(monkeypatch, logging, None)
    assert "ModuleNotFoundError" in warning


def test_an_init_that_never_returns_is_left_behind_with_one_warning(monkeypatch, logging):
    wandb, forever = FakeWandb(), threading.Event()
    wandb.init = lambda **options: forever.wait()
    (warning,) = track(monkeypatch, logging, wandb, patience_s=0.05)
    forever.set()
    assert "not done 0.05 s after the run's end" in warning


def test_a_backlog_without_bound_is_given_up(monkeypatch, logging):
    wandb, forever = FakeWandb(), threading.Event()
    wandb.init = lambda **options: forever.wait()
    (warning,) = track(monkeypatch, logging, wandb, steps=[1] * (LARGEST_BACKLOG + 5))
    forever.set()
    assert f"{LARGEST_BACKLOG} steps behind" in warning


def test_records_made_while_init_is_slow_are_logged_after_it(monkeypatch, logging):
    wandb, ready = FakeWandb(), threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    wandb.init = lambda **options: ready.wait() and wandb
    tracker = WandbTracker(logging, {}, "id")
    tracker.write(record(1))
    ready.set()
    tracker.close()
    assert [numbers["step"] for numbers in wandb.logged] == [1]


NO_JOB, JOB = Job(), Job(id="55")


@pytest.mark.parametrize(
    ("job", "resumes", "goes_on"),
    [
        (JOB, True, True),
        (JOB, False, True),  # requeued before it had saved: nothing to resume from
        (Job(id="55", restarts=1), False, True),
        (Job(restarts=1), False, True),  # by a launcher
        (Job(id="56"), False, False),
        (Job(id="56"), True, True),  # the next of a chain
        (NO_JOB, True, True),
        (NO_JOB, False, False),
    ],
)
def test_a_run_that_goes_on_keeps_its_id_and_a_new_one_gets_its_own(
    tmp_path, job, resumes, goes_on
):
    first, is_former = wandb_run_id(tmp_path / "run", JOB, resumes=False)
    assert not is_former
    again, is_former = wandb_run_id(tmp_path / "run", job, resumes=resumes)
    assert (again == first) == is_former == goes_on


def test_two_runs_by_hand_have_two_ids(tmp_path):
    ids = {wandb_run_id(tmp_path, NO_JOB, resumes=False)[0] for _ in range(2)}
    assert len(ids) == 2


def test_steps_made_again_alike_are_logged_once(monkeypatch, logging):
    wandb = FakeWandb()
    former = [record(3), record(4, loss=99.0), record(5)]
    assert track(monkeypatch, logging, wandb, steps=range(3, 8), former=former) == []
    assert [numbers["step"] for numbers in wandb.logged] == [4, 6, 7]
    assert wandb.options["id"] == "id"


def test_what_wandb_has_never_got_is_logged_again(monkeypatch, logging):
    wandb = FakeWandb()
    wandb.summary = {"step": 4}
    former = [record(step) for step in (3, 4, 5, 6)]
    track(monkeypatch, logging, wandb, steps=range(3, 8), former=former)
    assert [numbers["step"] for numbers in wandb.logged] == [5, 6, 7]


def test_numbers_have_the_names_of_the_metrics_file():
    numbers = to_wandb(record(3, valid_loss=2.5))
    assert numbers["loss"] == record(3).loss
    assert numbers["valid_loss"] == 2.5
    assert numbers["parts_s/forward"] == 0.25
    assert numbers["peak_memory_bytes"] == 2 << 30
    assert "mfu" not in numbers


@pytest.mark.parametrize(
    "body",
    [
        "raise ImportError('broken')",
        "def init(**options): raise RuntimeError('no server')",
        "import time\ndef init(**options): time.sleep(3600)",
        "class Run:\n  summary = {}\n  define_metric = print\n"
        "  def log(self, x): raise OSError(28)\n"
        "def init(**options): return Run()",
    ],
    ids=["import", "init", "slow", "log"],
)
def test_the_process_ends_with_success_and_one_warning(tmp_path, body):
    (tmp_path / "wandb.py").write_text(body)
    program = f"""
from megagrid.config.schema import LoggingConfig
from megagrid.train.tracking import WandbTracker
from tests.train.test_metrics import record
tracker = WandbTracker(
    LoggingConfig(run_dir={str(tmp_path)!r}, wandb="online"), {{}}, "id", patience_s=0.2
)
tracker.write(record(1))
tracker.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert done.stderr.count("warning: ") == 1
    assert "Traceback" not in done.stderr
