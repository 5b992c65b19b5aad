"""Where a run comes from: the checkpoint or the weights it begins with, and the checkpoints of its
own that it may be rolled back to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megagrid import checkpoint
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError
from megagrid.grid.grid import Grid
from megagrid.hf import carried
from megagrid.hf.start import start_from
from megagrid.launcher.relaunch import has_saved
from megagrid.train.state import RunState


class Past:
    """A run's past. Every rank has one, and uses it like the others.

    Args:
        launch: whose ranks these are; None where they aren't started again.
        checkpoints: the folder that the run's checkpoints lie in.
        say: told of what is loaded, passed over or strange.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        state: RunState,
        checkpoints: Path,
        launch: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._settings = config.checkpoint
        self._model = config.model
        self._world = grid.host
        self._state = state
        self._folder = Path(config.logging.run_dir)
        self._checkpoints = checkpoints
        self._say = say
        self._mine: list[Path] = []

    @property
    def has_checkpoint(self) -> bool:
        """Whether this process has saved one, or begun with one."""
        return bool(self._mine)

    def begin(self) -> None:
        """Load the checkpoint that the recipe names, if it names one and there is one; else the
        weights that it begins with, if it names any in place of those drawn.

        Raises:
            CheckpointError: what is named can't be loaded.
        """
        resume = self._settings.resume
        if checkpoint.on_first_rank(
            lambda: has_saved(self._launch, self._checkpoints), self._world
        ):
            resume = "latest"  # whatever the job began with, it has come further since
        if resume is None:
            self._begin_with_weights()
            return
        found = checkpoint.find_checkpoint(
            resume, self._checkpoints, self._world, by_first_rank=self._by_first_rank
        )
        if found is None:
            self._say("no checkpoint yet: a fresh start")
            self._begin_with_weights()
            return
        self._pass_over(found.skipped)
        for line in self._state.load(found.path, self._world, by_first_rank=self._by_first_rank):
            self._say(f"warning: {line}")
        checkpoint.on_first_rank(lambda: carried.take(found.path, self._folder), self._world)
        self._mine.append(found.path)
        self._say(f"resumed from {found.path} at step {self._state.progress.step}")

    def saved(self, step: int) -> None:
        """Take note of a checkpoint that the run has saved."""
        self._mine.append(self._checkpoints / checkpoint.step_name(step))

    def go_back(self) -> Path | None:
        """Load the last sound one of the checkpoints that this process has saved or begun with, all
        but the place in the data; None if there is none.

        Others that lie in the folder may be of a run that went another way.
        """
        there = checkpoint.on_first_rank(
            lambda: [path for path in reversed(self._mine) if path.is_dir()], self._world
        )
        path, skipped = checkpoint.first_sound(
            there, self._world, by_first_rank=self._by_first_rank
        )
        self._pass_over(skipped)
        if path is not None:
            self._state.roll_back(path, self._world, by_first_rank=self._by_first_rank)
        return path

    @property
    def _by_first_rank(self) -> bool:
        return self._settings.read_by == "first_rank"

    def _pass_over(self, lines: tuple[str, ...]) -> None:
        for line in lines:
            self._say(f"passed over: {line}")

    def _begin_with_weights(self) -> None:
        if self._settings.initialize_from is None:
            return
        for line in start_from(
            Path(self._settings.initialize_from),
            self._model,
            self._state.weights(),
            self._folder,
            self._world,
            by_first_rank=self._by_first_rank,
        ):
            self._say(f"warning: {line}")
        self._say(f"began with the weights of {self._settings.initialize_from}")


def refuse_to_start_over(config: Config, launch: str | None) -> None:
    """See whether a run may begin as the recipe says, once nobody else writes to its folder.

    Raises:
        CheckpointError: there is a run in the folder, which a fresh start would replace.
    """
    folder = Path(config.logging.run_dir)
    checkpoints = folder / checkpoint.CHECKPOINTS
    if config.checkpoint.resume is not None or has_saved(launch, checkpoints):
        return
    saved = checkpoint.newest_first(checkpoints)
    if saved:
        raise CheckpointError(
            f'logging.run_dir="{folder}" has a run at step {saved[0].step}; go on from there '
            "with checkpoint.resume=latest, or name another folder"
        )
