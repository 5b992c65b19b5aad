"""A run from its first step to its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn, TextIO

import torch

from megagrid import checkpoint
from megagrid.config.dump import dump
from megagrid.config.schema import Config
from megagrid.data import DataSplits, Loader, Sampler, SampleSource
from megagrid.data import build as build_data
from megagrid.errors import CheckpointError, DataError, MegagridError
from megagrid.exit_codes import STOPPED
from megagrid.grid import bootstrap
from megagrid.grid.grid import Grid
from megagrid.grid.start import (
    expect_steps,
    meeting,
    renumbering,
    running_grid,
    with_shard_size,
)
from megagrid.health.beat import (
    ENDING,
    EVALUATING,
    JOINING,
    LOADING,
    SAVING,
    TRAINING,
    forget,
)
from megagrid.health.heart import Heart, Pulse
from megagrid.health.stacks import StackSampler
from megagrid.hf import carried
from megagrid.hf.outgoing import EXPORT_DTYPES, to_hf
from megagrid.launcher.launch import FirstStep
from megagrid.pipeline.clock import DeviceClock
from megagrid.train.attempt import Attempt, StepMaker, find_nan_hint, remedies
from megagrid.train.build import build_engine
from megagrid.train.console import ConsoleTable, save_line
from megagrid.train.determinism import deterministic_kernels
from megagrid.train.digest import DigestLog
from megagrid.train.faults import check_memory, is_lost_peer, told_in_a_line
from megagrid.train.folder import SECONDS_TO_DIE, lock_folder
from megagrid.train.guards import Action
from megagrid.train.heartbeat import identify
from megagrid.train.metrics import (
    EVERY_STEP,
    GuardRecord,
    MetricsLog,
    SaveRecord,
    Sink,
    StepRecord,
    Stopwatch,
    read_records,
)
from megagrid.train.past import Past, refuse_to_start_over
from megagrid.train.recording import Recorder, guard_record
from megagrid.train.saving import Saver
from megagrid.train.state import Progress, RunState
from megagrid.train.step import News, evaluate
from megagrid.train.stopping import StopRequest
from megagrid.train.trace import TraceLog
from megagrid.train.tracking import WandbTracker, wandb_run_id

METRICS = "metrics.jsonl"


def train(config: Config, stop: StopRequest, heart: Heart) -> int:
    """Train on this rank until the last step, or until any rank is asked to stop; returns the exit
    code."""
    pulse = heart.pulse
    pulse.enter(JOINING)
    has_device = config.train.device != "cpu" and torch.accelerator.is_available()
    heart.look_with(StackSampler(has_device=has_device))
    with (
        meeting(config, bootstrap.read()) as met,
        told_in_a_line(config, met.environment),
        running_grid(config, met) as grid,
        deterministic_kernels(config.train.deterministic),
        stop.by_signals(),
    ):
        heart.identify(identify(config, met.environment, met.start))
        if met.is_reordered and grid.rank == 0:
            print(renumbering(met), flush=True)
        pulse.device = str(grid.device)
        pulse.enter(LOADING)
        config = with_shard_size(config, grid.dp_shard.size)
        check_memory(config, grid, met.cluster.neighbours(grid.rank))
        code = Run(config, grid, stop, pulse).run()
        pulse.enter(ENDING)
    if code == 0 and grid.rank == 0:
        _export(config)  # nobody waits for it: the ranks have let go of each other
    return code


class Run:
    """One rank's part of a run.

    Args:
        stop: asks the run to end after the step that it is in.
        pulse: told how far it is.

    Attributes:
        speaks: whether this rank is the one that prints and writes records.
        maker: tries its steps.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        stop: StopRequest | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.config = config
        self.grid = grid
        self._stop = stop or StopRequest()
        self._pulse = pulse or Pulse()
        self._heard = News()
        self.speaks = grid.rank == 0
        # No method, which would keep a run that failed to begin, and with it the folder's lock.
        self._say = partial(print, flush=True) if self.speaks else _say_nothing
        self.folder = Path(config.logging.run_dir)
        self.checkpoints = self.folder / checkpoint.CHECKPOINTS
        self._lock: TextIO | None = None
        self._saves: MetricsLog[SaveRecord] | None = None
        checkpoint.on_first_rank(self._take_folder, grid.world)
        self._pulse.owns_folder = True
        self.data = _open_data(config)
        self.engine = build_engine(config, grid)
        if grid.device.type != "cpu":
            self.engine.executor.clock = DeviceClock()
        self.state = RunState(self.engine, self.data.fingerprint)
        launch = bootstrap.read().launch
        self.past = Past(config, grid, self.state, self.checkpoints, launch, self._say)
        self.past.begin()
        self.saver = self._make_saver()
        self.loader = self._loader(self.data.train, prefetch=config.data.prefetch)
        self.total_steps = config.train.total_steps
        self._check_data()
        self.digests = DigestLog(self.engine, self.folder, self.progress.step)
        self.maker = StepMaker(self.engine, self.state, self.total_steps, self._news, self.digests)
        self.recorder = Recorder(config, grid.world.size, grid.device)

    @property
    def progress(self) -> Progress:
        """Counts the steps made."""
        return self.state.progress

    @property
    def _is_over(self) -> bool:
        return self._heard.stop or self.progress.step >= self.total_steps

    def run(self) -> int:
        """Train from where the progress is to the last step, or to the one that all ranks agree to
        stop after, and let go of the folder.

        Returns:
            the exit code.
        """
        if self._is_over:
            self._say(f"nothing to do: step {self.total_steps}, the last of the run, is made")
        sinks = self._open_sinks()
        trace = self._open_trace()
        watch = Stopwatch()
        steps = self.loader.steps(self.progress.consumed_samples)
        self._pulse.step = self.progress.step
        self._pulse.enter(TRAINING)
        try:
            while not self._is_over:
                with watch.part("data"):
                    batches = next(steps)
                is_traced = trace.is_due(self.progress.step + 1)
                attempt = self.maker.make(batches, watch, is_traced=is_traced)
                self._heard = attempt.result.news
                match attempt.verdict.action:
                    case Action.MAKE | Action.SKIP:
                        record = self._record(attempt, watch, trace)
                        for sink in sinks:
                            sink.write(record)
                    case Action.ROLL_BACK:
                        self._roll_back(attempt, [*sinks, trace, self.digests])
                    case Action.END:
                        self._end_for(attempt)
                self._note_progress()
                self._save_if_due(attempt)
                watch.lap()  # evaluating and saving are no part of a step
            self.saver.finish()
        except RuntimeError as error:
            if is_lost_peer(error):
                self.saver.abandon()
            raise
        finally:
            steps.close()
            self.saver.close()
            trace.close()
            self.digests.close()
            for sink in (*sinks, self._saves, self._lock):
                if sink is not None:
                    sink.close()
            self._saves = None
        return self._end()

    def _note_progress(self) -> None:
        if not self._pulse.is_under_way:
            expect_steps(self.config, self.grid)
        self._pulse.made(self.progress.step)
        if clock := self.engine.executor.clock:
            self._pulse.compute_s = clock.read() or self._pulse.compute_s

    def _end(self) -> int:
        """Say so if the run has ended early; returns the exit code."""
        step = self.progress.step
        if step >= self.total_steps:
            return 0
        self._say(
            f"a signal has asked the run to stop: it is saved after step {step} of "
            f"{self.total_steps}; go on with checkpoint.resume=latest"
        )
        # The launcher gives the others half a minute once one has ended, and the first may still
        # have been closing what it writes to.
        checkpoint.on_first_rank(lambda: None, self.grid.host)
        return STOPPED

    def _record(self, attempt: Attempt, watch: Stopwatch, trace: TraceLog) -> StepRecord:
        """Write down what the step was that has just been counted, and evaluate if it is time."""
        seconds, parts = watch.lap()
        if attempt.spans is not None:
            trace.write(attempt.number, attempt.spans)
        if not attempt.is_made:
            self._say(f"skipped {attempt.reason}")
            if not attempt.verdict.is_overflow:
                self._note_in_guard_log(attempt)
        return self.recorder.step(attempt, self.state, seconds, parts, self._evaluate_if_due())

    def _roll_back(self, attempt: Attempt, logs: Sequence[Sink | TraceLog | DigestLog]) -> None:
        """Go back to the run's last sound checkpoint, in place, and on with the data after the step
        that led here.

        Raises:
            MegagridError: there is none, or the data ends before the run does.
        """
        self.saver.settle()
        path = self.past.go_back()
        if path is None:
            verdict = replace(attempt.verdict, action=Action.END)
            self._note_in_guard_log(replace(attempt, verdict=verdict))
            interval = self.config.checkpoint.save_interval
            raise MegagridError(
                f"{attempt.reason}; the run has no checkpoint to roll back to yet; lower "
                f"checkpoint.save_interval={interval} or optimizer.lr"
                + find_nan_hint(attempt, self.config.guard)
            )
        self._check_data()
        step, sample = self.progress.step, self.progress.consumed_samples
        self._say(
            f"rolled back to {path} at step {step}, for {attempt.reason}; the run goes on with "
            f"sample {sample}"
        )
        for log in (*logs, self._saves):
            if log is not None:
                log.rewind(step)
        self._note_in_guard_log(attempt)

    def _end_for(self, attempt: Attempt) -> NoReturn:
        """
        Raises:
            MegagridError: why the run ends with a step that wasn't made.
        """
        self._note_in_guard_log(attempt)
        again = "Resume from the last checkpoint" if self.past.has_checkpoint else "Begin again"
        raise MegagridError(
            f"{attempt.reason}; the weights weren't updated and nothing was saved. {again} with "
            + remedies(attempt, self.config)
        )

    def _note_in_guard_log(self, attempt: Attempt) -> None:
        if self.speaks:
            log = MetricsLog(self.folder / "guard.jsonl", EVERY_STEP, GuardRecord)
            log.write(guard_record(attempt, self.progress.step))
            log.close()

    def _news(self) -> News:
        return News(stop=self._stop.is_made, save_failed=self.saver.has_failed)

    def _evaluate_if_due(self) -> float | None:
        interval, step = self.config.evaluation.interval, self.progress.step
        is_due = step == self.total_steps or (interval > 0 and step % interval == 0)
        if self.data.valid is None or not is_due:
            return None
        loader = self._loader(self.data.valid, pad=True)
        with self._pulse.within(EVALUATING):
            steps = islice(loader.steps(), self.config.evaluation.batches)
            return evaluate(self.engine, list(steps))

    def save(self, *, is_last: bool = False) -> None:
        """Save the run as it is. Collective; see `Saver.save`."""
        with self._pulse.within(SAVING):
            self.saver.save(self.state, is_last=is_last)

    def _save_if_due(self, attempt: Attempt) -> None:
        """Save after steps that are to be saved and, whatever the recipe says, after the one that
        the run is stopped at; and look after the save behind the training."""
        settings = self.config.checkpoint
        self.saver.report_if_done()
        if self._heard.save_failed:
            self.saver.settle()
        has_gone_on = attempt.number == self.progress.step
        is_due = checkpoint.should_save(
            self.progress.step, self.total_steps, settings.save_interval, settings.save_at_end
        )
        if self._heard.stop or (has_gone_on and is_due):
            self.save(is_last=self._is_over)

    def _check_data(self) -> None:
        """
        Raises:
            DataError: the data ends before the run's last step and must not be repeated.
        """
        done, total = self.progress.step, self.total_steps
        possible = self.loader.steps_left(self.progress.consumed_samples)
        if possible is not None and done + possible < total:
            batch = self.config.train.global_batch_size
            raise DataError(
                f"the data fills {done + possible} steps of train.global_batch_size={batch}, the "
                f"run has {total}; set train.steps={done + possible} or data.repeat=true"
            )

    def _loader(self, source: SampleSource, **how: int) -> Loader:
        train, data, dp = self.config.train, self.config.data, self.grid.dp
        return Loader(
            source,
            Sampler(train.global_batch_size, train.micro_batch_size, dp.size),
            dp.rank,
            mask_documents=data.document_mask,
            reset_positions=data.resets_positions,
            masked_ids=data.mask_token_ids,
            **how,
        )

    def _take_folder(self) -> None:
        # Half of the time in which the others wait for this rank.
        patience = min(SECONDS_TO_DIE, self.config.train.setup_timeout_seconds / 2)
        self._lock = lock_folder(self.folder, bootstrap.read_job(), patience)
        # A start that is refused has no word in the run that lies here, nor on it.
        refuse_to_start_over(self.config, bootstrap.read().launch)
        forget(self.folder, self.grid.world.size)

    def _open_sinks(self) -> list[Sink]:
        """Where records go: nowhere, but on the rank that speaks."""
        if not self.speaks:
            return []
        tracker = self._open_tracker()  # before what is no longer so is dropped from the records
        (self.folder / "config.toml").write_text(dump(self.config), encoding="utf-8")
        self._saves = MetricsLog(self.folder / "saves.jsonl", self.progress.step, SaveRecord)
        error_file = bootstrap.read().error_file
        return [
            MetricsLog(self.folder / METRICS, self.progress.step),
            ConsoleTable(self.total_steps, self.config.logging.interval),
            *([FirstStep(error_file)] if error_file is not None else []),
            *tracker,
        ]

    def _open_tracker(self) -> list[Sink]:
        logging, step, metrics = self.config.logging, self.progress.step, self.folder / METRICS
        if logging.wandb == "off":
            return []
        resumes = step > 0 or self.config.checkpoint.resume is not None
        run_id, goes_on = wandb_run_id(self.folder, bootstrap.read_job(), resumes=resumes)
        former = read_records(metrics) if goes_on and metrics.is_file() else []
        again = [record for record in former if record.step > step]
        return [WandbTracker(logging, self.config.model_dump(), run_id, again)]

    def _open_trace(self) -> TraceLog:
        return TraceLog(
            self.folder,
            interval=self.config.logging.trace_interval,
            placement=self.grid.placement,
            rank=self.grid.rank,
            program=self.engine.training,
            resume_step=self.progress.step,
        )

    def _make_saver(self) -> Saver:
        tokenizer = self.data.tokenizer
        return Saver(
            self.config,
            self.grid,
            self.checkpoints,
            extra_files=[*([tokenizer] if tokenizer else []), *carried.of_run(self.folder)],
            report=self._report_save,
            warn=lambda text: self._say(f"warning: {text}"),
        )

    def _report_save(self, record: SaveRecord) -> None:
        self.past.saved(record.step)
        if self._saves is not None:
            self._saves.write(record)
        self._say(save_line(record))


def _say_nothing(text: str) -> None:
    """What ranks say that don't speak."""


def _export(config: Config) -> None:
    """Write the run's last weights for transformers, if the recipe asks for it."""
    settings = config.checkpoint
    if settings.export_hf is None:
        return
    folder, dtype = Path(settings.export_hf), EXPORT_DTYPES[settings.export_hf_dtype]
    try:
        to_hf(config.logging.run_dir, folder, dtype=dtype, key="logging.run_dir")
    except CheckpointError as error:
        again = f"megagrid convert to-hf {config.logging.run_dir} DIR"
        raise CheckpointError(
            f"checkpoint.export_hf: {error}; the run is saved: `{again}`"
        ) from None
    print(f"exported to {folder}", flush=True)


def _open_data(config: Config) -> DataSplits:
    data = config.data
    return build_data(
        data.paths,
        data.weights,
        config.train.seq_length,
        config.train.seed,
        data.valid_fraction,
        data.repeat,
        data.cache_dir,
        config.model.vocab_size,
    )
