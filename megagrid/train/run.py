"""A run from its first step to its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from megagrid import checkpoint
from megagrid.config.dump import dump
from megagrid.config.schema import Config
from megagrid.data import Batch, DataSplits, Loader, Sampler
from megagrid.data import build as build_data
from megagrid.errors import CheckpointError, DataError, MegagridError
from megagrid.grid import bootstrap
from megagrid.grid.grid import Grid
from megagrid.grid.start import running_grid
from megagrid.optim.lr_schedule import learning_rate
from megagrid.plan import flops, hardware
from megagrid.train.build import build_engine
from megagrid.train.console import ConsoleTable
from megagrid.train.folder import lock_folder
from megagrid.train.metrics import MetricsLog, Sink, StepRecord, Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients, evaluate
from megagrid.train.trace import TraceLog
from megagrid.train.tracking import WandbTracker


def train(config: Config) -> int:
    """Train on this rank until the last step; returns the exit code."""
    with running_grid(config, bootstrap.read()) as grid:
        Run(config, grid).run()
    return 0


@dataclass
class Progress:
    """Where a run is: with weights and optimizer states, all that a resumed run needs.

    There is no state of random numbers, which are functions of seed, step and sample, nor of the
    learning rate, which is one of the step.

    Attributes:
        step: optimizer steps made.
        consumed_samples: samples fed so far, and the number of the next unseen one.
        consumed_tokens: tokens of those.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


class Run:
    """One rank's part of a run.

    Attributes:
        progress: counts the steps made.
        speaks: whether this rank is the one that prints and writes records.
    """

    def __init__(self, config: Config, grid: Grid) -> None:
        self.config = config
        self.grid = grid
        self.speaks = grid.rank == 0
        self.folder = Path(config.logging.run_dir)
        self.checkpoints = self.folder / checkpoint.CHECKPOINTS
        self._lock: TextIO | None = None
        checkpoint.on_first_rank(self._take_folder, grid.world)
        self.data = _open_data(config)
        self.engine = build_engine(config, grid)
        self.progress = Progress()
        self._resume()
        self.loader, self.total_steps = self._plan_steps()
        self.peak_flops = _peak_flops(config, grid.device)

    def run(self) -> None:
        """Train from where the progress is to the last step, and let go of the folder."""
        if self.progress.step >= self.total_steps:
            self._say(f"nothing to do: the run has {self.total_steps} steps, all made")
        sinks = self._open_sinks()
        trace = self._open_trace()
        watch = Stopwatch()
        steps = self.loader.steps(self.progress.consumed_samples)
        try:
            while self.progress.step < self.total_steps:
                with watch.part("data"):
                    batches = next(steps)
                record = self._step(batches, watch, trace)
                for sink in sinks:
                    sink.write(record)
                self._save_if_due()
                watch.lap()  # evaluating and saving are no part of a step
        finally:
            steps.close()
            trace.close()
            for sink in sinks:
                sink.close()
            if self._lock is not None:
                self._lock.close()

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
        result = compute_gradients(self.engine, batches, number, watch, spans)
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

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """MFU and HFU of a step, if the peak of the device is stated or known.

        Every position counts, trained on or not: the device computes them all.
        """
        if self.peak_flops is None:
            return {}
        cost = flops.token_flops(self.config.model, self.config.train.seq_length)
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

    def _save_if_due(self) -> None:
        settings = self.config.checkpoint
        if not checkpoint.should_save(
            self.progress.step, self.total_steps, settings.save_interval, settings.save_at_end
        ):
            return
        tokenizer = self.data.tokenizer
        checkpoint.save(
            self.checkpoints,
            self._entries(),
            self._trainer_state(),
            world=self.grid.world,
            config=dump(self.config),
            extra_files=[tokenizer] if tokenizer else [],
            keep_last=settings.keep_last,
        )

    def _resume(self) -> None:
        """Load the checkpoint that the recipe names, if it names one and there is one."""
        if self.config.checkpoint.resume is None:
            self._refuse_to_start_over()
            return
        world = self.grid.world
        found = checkpoint.find_checkpoint(self.config.checkpoint.resume, self.checkpoints, world)
        if found is None:
            self._say("no checkpoint yet: a fresh start")
            return
        for line in found.skipped:
            self._say(f"passed over: {line}")
        checkpoint.load(found.path, self._entries(), world=world, is_verified=True)
        state = checkpoint.load_trainer_state(found.path, world)
        self.progress = Progress(**state["progress"])
        self.engine.optimizer.set_step(self.progress.step)
        for name, value in self._identity().items():
            if name in state["identity"] and state["identity"][name] != value:
                self._say(
                    f"warning: {name} is {value!r}, the checkpoint was trained with "
                    f"{state['identity'][name]!r}: what follows isn't the same run"
                )
        self._say(f"resumed from {found.path} at step {self.progress.step}")

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

    def _trainer_state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "progress": asdict(self.progress),
            "identity": self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run and no other, beside the tensors' shapes: the function that is
        computed, the data, which of it is held out, and its order."""
        model = self.config.model.model_dump(exclude={"preset", "make_vocab_size_divisible_by"})
        return {
            **{f"model.{key}": value for key, value in model.items()},
            "train.seed": self.config.train.seed,
            "data.valid_fraction": self.config.data.valid_fraction,
            "the data's fingerprint": self.data.fingerprint,
        }

    def _entries(self) -> list[checkpoint.Entry]:
        return checkpoint.entries(self.engine.shards, self.engine.optimizer)

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

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)


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
