"""A run from its first step to its last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch

from megagrid import checkpoint
from megagrid.config.dump import dump
from megagrid.config.schema import Config
from megagrid.data import Batch, DataSplits, Loader, Sampler
from megagrid.data import build as build_data
from megagrid.errors import CheckpointError, DataError, MegagridError
from megagrid.exit_codes import STOPPED
from megagrid.grid import bootstrap
from megagrid.grid.grid import Grid
from megagrid.grid.start import running_grid, with_shard_size
from megagrid.hf import carried
from megagrid.hf.outgoing import EXPORT_DTYPES, to_hf
from megagrid.hf.start import start_from
from megagrid.optim.lr_schedule import learning_rate
from megagrid.plan import flops, hardware
from megagrid.train.build import build_engine
from megagrid.train.console import ConsoleTable, save_line
from megagrid.train.faults import check_memory, is_lost_peer, told_in_a_line
from megagrid.train.folder import lock_folder
from megagrid.train.metrics import MetricsLog, SaveRecord, Sink, StepRecord, Stopwatch
from megagrid.train.saving import Saver
from megagrid.train.state import Progress, RunState
from megagrid.train.step import News, apply_gradients, compute_gradients, evaluate
from megagrid.train.stopping import StopRequest
from megagrid.train.trace import TraceLog
from megagrid.train.tracking import WandbTracker


def train(config: Config, stop: StopRequest) -> int:
    """Train on this rank until the last step, or until any rank is asked to stop; returns the exit
    code."""
    environment = bootstrap.read()
    with (
        told_in_a_line(config, environment),
        running_grid(config, environment) as grid,
        stop.by_signals(),
    ):
        config = with_shard_size(config, grid.dp_shard.size)
        check_memory(config, grid, environment)
        code = Run(config, grid, stop).run()
    if code == 0 and environment.rank == 0:
        _export(config)  # nobody waits for it: the ranks have let go of each other
    return code


class Run:
    """One rank's part of a run.

    Args:
        stop: asks the run to end after the step that it is in.

    Attributes:
        speaks: whether this rank is the one that prints and writes records.
    """

    def __init__(self, config: Config, grid: Grid, stop: StopRequest | None = None) -> None:
        self.config = config
        self.grid = grid
        self._stop = stop or StopRequest()
        self._heard = News()
        self.speaks = grid.rank == 0
        self.folder = Path(config.logging.run_dir)
        self.checkpoints = self.folder / checkpoint.CHECKPOINTS
        self._lock: TextIO | None = None
        self._saves: MetricsLog[SaveRecord] | None = None
        checkpoint.on_first_rank(self._take_folder, grid.world)
        self.data = _open_data(config)
        self.engine = build_engine(config, grid)
        self.state = RunState(self.engine, self.data.fingerprint)
        self._resume()
        self.saver = self._make_saver()
        self.loader, self.total_steps = self._plan_steps()
        self.peak_flops = _peak_flops(config, grid.device)

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
        try:
            while not self._is_over:
                with watch.part("data"):
                    batches = next(steps)
                record = self._step(batches, watch, trace)
                for sink in sinks:
                    sink.write(record)
                self._save_if_due()
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
            for sink in (*sinks, self._saves, self._lock):
                if sink is not None:
                    sink.close()
            self._saves = None
        return self._end()

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

    def _step(self, batches: Sequence[Batch], watch: Stopwatch, trace: TraceLog) -> StepRecord:
        """Make one optimizer step, evaluate if it is time, and say what happened."""
        config, progress = self.config, self.progress
        number = progress.step + 1
        first_sample = progress.consumed_samples
        lr = learning_rate(
            number,
            config=config.lr_schedule,
            peak=config.optimizer.lr,
            total_steps=self.total_steps,
        )
        spans = [] if trace.is_due(number) else None
        result = compute_gradients(self.engine, batches, number, watch, spans, self._news)
        self._heard = result.news
        if not result.is_finite:
            raise MegagridError(
                f"step {number}: loss {result.loss}, gradient norm {result.grad_norm}; the weights "
                f"weren't updated and nothing was saved. Resume from the last checkpoint with a "
                f"lower optimizer.lr={config.optimizer.lr} or a smaller optimizer.clip_grad"
            )
        with watch.part("optimizer"):
            apply_gradients(self.engine, result.grad_norm, lr)
        progress.step = number
        progress.consumed_samples += config.train.global_batch_size
        progress.consumed_tokens += config.train.tokens_per_step
        seconds, parts = watch.lap()
        if spans is not None:
            trace.write(number, spans)
        tokens_per_s = result.valid_tokens / seconds
        return StepRecord(
            step=number,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            valid_tokens=result.valid_tokens,
            consumed_tokens=progress.consumed_tokens,
            consumed_samples=progress.consumed_samples,
            sample_ids=(first_sample, progress.consumed_samples - 1),
            step_time_s=seconds,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=tokens_per_s / self.grid.world.size,
            parts_s=parts,
            peak_memory_bytes=result.peak_memory_bytes,
            **self._utilisation(seconds),
            valid_loss=self._evaluate_if_due(),
        )

    def _news(self) -> News:
        return News(stop=self._stop.is_made, save_failed=self.saver.has_failed)

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """MFU and HFU of a step, if the peak of the device is stated or known.

        Every position counts, trained on or not: the device computes them all.
        """
        if self.peak_flops is None:
            return {}
        memory = self.config.memory
        cost = flops.token_flops(
            self.config.model,
            self.config.train.seq_length,
            recompute=memory.recompute,
            recompute_interval=memory.recompute_interval,
        )
        tokens_per_s = self.config.train.tokens_per_step / seconds
        ranks = {"num_ranks": self.grid.world.size, "peak_flops": self.peak_flops}
        return {
            "mfu": flops.utilisation(cost.model, tokens_per_s, **ranks),
            "hfu": flops.utilisation(cost.hardware, tokens_per_s, **ranks),
        }

    def _evaluate_if_due(self) -> float | None:
        interval, step = self.config.evaluation.interval, self.progress.step
        is_due = step == self.total_steps or (interval > 0 and step % interval == 0)
        if self.data.valid is None or not is_due:
            return None
        loader = Loader(self.data.valid, self._sampler(), self.grid.dp.rank, pad=True)
        return evaluate(self.engine, list(islice(loader.steps(), self.config.evaluation.batches)))

    def save(self, *, is_last: bool = False) -> None:
        """Save the run as it is. Collective; see `Saver.save`."""
        self.saver.save(self.state, is_last=is_last)

    def _save_if_due(self) -> None:
        """Save after steps that are to be saved and, whatever the recipe says, after the one that
        the run is stopped at; and look after the save behind the training."""
        settings = self.config.checkpoint
        self.saver.report_if_done()
        if self._heard.save_failed:
            self.saver.settle()
        if self._heard.stop or checkpoint.should_save(
            self.progress.step, self.total_steps, settings.save_interval, settings.save_at_end
        ):
            self.save(is_last=self._is_over)

    def _resume(self) -> None:
        """Load the checkpoint that the recipe names, if it names one and there is one."""
        settings = self.config.checkpoint
        if settings.resume is None:
            self._refuse_to_start_over()
            self._begin()
            return
        world, by_first_rank = self.grid.host, settings.read_by == "first_rank"
        found = checkpoint.find_checkpoint(
            settings.resume, self.checkpoints, world, by_first_rank=by_first_rank
        )
        if found is None:
            self._say("no checkpoint yet: a fresh start")
            self._begin()
            return
        for line in found.skipped:
            self._say(f"passed over: {line}")
        for line in self.state.load(found.path, world, by_first_rank=by_first_rank):
            self._say(f"warning: {line}")
        checkpoint.on_first_rank(lambda: carried.take(found.path, self.folder), world)
        self._say(f"resumed from {found.path} at step {self.progress.step}")

    def _begin(self) -> None:
        """Take the weights that the recipe begins with, if it names any in place of those drawn."""
        settings = self.config.checkpoint
        if settings.initialize_from is None:
            return
        for line in start_from(
            Path(settings.initialize_from),
            self.config.model,
            self.state.weights(),
            self.folder,
            self.grid.host,
            by_first_rank=settings.read_by == "first_rank",
        ):
            self._say(f"warning: {line}")
        self._say(f"began with the weights of {settings.initialize_from}")

    def _refuse_to_start_over(self) -> None:
        """Raises:
        CheckpointError: the run's folder has checkpoints, which a fresh start would replace.
        """
        saved = checkpoint.newest_first(self.checkpoints)
        if saved:
            raise CheckpointError(
                f'logging.run_dir="{self.folder}" has a run at step {saved[0].step}; go on from '
                "there with checkpoint.resume=latest, or name another folder"
            )

    def _plan_steps(self) -> tuple[Loader, int]:
        """The loader of the training data, and the run's last step.

        Raises:
            DataError: the data ends before that step and must not be repeated.
        """
        config = self.config.train
        loader = Loader(
            self.data.train,
            self._sampler(),
            self.grid.dp.rank,
            prefetch=self.config.data.prefetch,
        )
        total = config.total_steps
        possible = loader.steps_left(self.progress.consumed_samples)
        if possible is not None and self.progress.step + possible < total:
            raise DataError(
                f"the data fills {self.progress.step + possible} steps of "
                f"train.global_batch_size={config.global_batch_size}, the run has {total}; set "
                f"train.steps={self.progress.step + possible} or data.repeat=true"
            )
        return loader, total

    def _sampler(self) -> Sampler:
        train = self.config.train
        return Sampler(train.global_batch_size, train.micro_batch_size, self.grid.dp.size)

    def _take_folder(self) -> None:
        self._lock = lock_folder(self.folder)

    def _open_sinks(self) -> list[Sink]:
        """Where records go: nowhere, but on the rank that speaks."""
        if not self.speaks:
            return []
        logging = self.config.logging
        (self.folder / "config.toml").write_text(dump(self.config), encoding="utf-8")
        self._saves = MetricsLog(self.folder / "saves.jsonl", self.progress.step, SaveRecord)
        sinks: list[Sink] = [
            MetricsLog(self.folder / "metrics.jsonl", self.progress.step),
            ConsoleTable(self.total_steps, logging.interval),
        ]
        if logging.wandb != "off":
            settings = self.config.model_dump()
            sinks.append(WandbTracker(logging, settings, self.progress.step))
        return sinks

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
        if self._saves is not None:
            self._saves.write(record)
        self._say(save_line(record))

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)


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


def _peak_flops(config: Config, device: torch.device) -> float | None:
    """FLOP/s that one device can do at best: as stated, else as known by its name."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    known = hardware.find_device(torch.cuda.get_device_name(device))
    return known.peak_flops if known else None
