"""Weights & Biases as one more place where a step's record goes, and never as a danger to the run.

Everything that touches wandb, its import included, happens on one thread of its own that takes
records from a queue. Training only ever puts a record on the queue; it can't be stopped by an
error in wandb, nor be held up by a server that doesn't answer:

    training   write write write write ... close (waits, but no longer than `patience_s`)
                 |     |     |     |         |
    thread     import init  log   log  ...  finish        any error: one warning, then silence
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megagrid.config.schema import LoggingConfig
from megagrid.grid.bootstrap import Job
from megagrid.terminal import warn_on_stderr
from megagrid.train.metrics import StepRecord

RUN_ID_FILE = "wandb-run-id"
"""In the run's folder: the id under which wandb knows the run, so that a resume continues it, and
the scheduler's job that made it."""

LARGEST_BACKLOG = 10_000
"""Records that wait for wandb before it is given up."""

LARGEST_STEP = 2**63


class WandbTracker:
    """Sends records to wandb; gives up with one warning at the first thing that goes wrong.

    Args:
        logging: its `wandb` key says "online" or "offline", "off" makes no tracker.
        config: what wandb shows as the run's configuration.
        run_id: the id that the run has in wandb, see `wandb_run_id`.
        former: records that wandb may have of steps that are to be made again. Those that come out
            the same aren't logged twice.
        warn: told once why tracking ended.
        patience_s: longest wait in `close` for what isn't sent yet.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        config: Mapping[str, Any],
        run_id: str,
        former: Iterable[StepRecord] = (),
        warn: Callable[[str], None] = warn_on_stderr,
        patience_s: float = 60.0,
    ) -> None:
        self._logging = logging
        self._config = dict(config)
        self._run_id = run_id
        self._former = {record.step: _computed(record) for record in former}
        self._warn = warn
        self._patience_s = patience_s
        self._records: queue.Queue[StepRecord | None] = queue.Queue(LARGEST_BACKLOG)
        self._lock = threading.Lock()
        self._has_ended = False
        # A daemon: a thread that hangs in wandb must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        self._put(record)

    def rewind(self, step: int) -> None:
        """wandb keeps what it has: steps made again are logged again, under their numbers."""

    def close(self) -> None:
        """Send what is left."""
        self._put(None)
        self._thread.join(0.0 if self._has_ended else self._patience_s)
        if self._thread.is_alive():
            self._give_up(f"not done {self._patience_s:g} s after the run's end")

    def _put(self, record: StepRecord | None) -> None:
        if self._has_ended:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._give_up(f"{LARGEST_BACKLOG} steps behind")

    def _work(self) -> None:
        try:
            run = self._start()
            # Where wandb tells what it has: a machine that died may have kept the last to itself.
            last = run.summary.get("step") or LARGEST_STEP
            while (record := self._records.get()) is not None and not self._has_ended:
                if record.step > last or self._former.pop(record.step, None) != _computed(record):
                    run.log(to_wandb(record))
            run.finish()
        except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt too
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._give_up(reason.rstrip(".: "))

    def _start(self) -> Any:
        import wandb

        folder = Path(self._logging.run_dir)
        run = wandb.init(
            mode=self._logging.wandb,
            project=self._logging.wandb_project,
            name=self._logging.wandb_name,
            dir=str(folder),
            id=self._run_id,
            resume="allow",
            config=self._config,
            settings={
                "console": "off",  # the run's log is written by the run
                "quiet": True,
                "login_timeout": self._patience_s,
                "init_timeout": self._patience_s,
                "finish_timeout": self._patience_s,
            },
        )
        # wandb's own step only grows: it silently drops what a resumed run logs again below the
        # last step of the run that died. Steps are a metric like any other instead.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._warn(
            f"wandb: {reason}; the run goes on without it, every step is in metrics.jsonl "
            "(logging.wandb=off silences this)"
        )


def to_wandb(record: StepRecord) -> dict[str, float]:
    """The record's numbers, by the names they have in metrics.jsonl."""
    numbers = {
        name: value for name, value in vars(record).items() if isinstance(value, int | float)
    }
    parts = {f"parts_s/{name}": seconds for name, seconds in record.parts_s.items()}
    peak = record.peak_memory_bytes
    return numbers | parts | ({"peak_memory_bytes": max(peak)} if peak else {})


def _computed(record: StepRecord) -> tuple[float | None, ...]:
    """What no clock has a say in; equal numbers are of one step of one trajectory."""
    return record.loss, record.grad_norm, record.lr, record.valid_loss, record.sample_ids


def wandb_run_id(run_dir: Path, job: Job, *, resumes: bool) -> tuple[str, bool]:
    """The id that the run has in wandb, and whether it is the former one, with which it goes on.

    Args:
        job: one that starts again goes on, even if it hadn't saved yet.
        resumes: whether the run is asked to go on, or does.
    """
    path = run_dir / RUN_ID_FILE
    if path.is_file():
        former, *of_job = path.read_text(encoding="utf-8").split()
        if resumes or job.restarts > 0 or of_job == [job.id]:
            return former, True
    run_dir.mkdir(parents=True, exist_ok=True)
    run_id = secrets.token_hex(4)
    path.write_text(f"{run_id} {job.id or ''}".rstrip() + "\n", encoding="utf-8")
    return run_id, False
