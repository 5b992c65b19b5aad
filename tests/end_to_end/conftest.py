"""Runs on the pool of ranks, and the command line in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrid.cli import main
from megagrid.config.dump import dump
from megagrid.grid.placement import Placement
from tests.end_to_end.jobs import Ended, Job
from tests.end_to_end.t0 import ALONE, Sections, Trainer, t0
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def trainer(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(ranks, tmp_path_factory.mktemp("runs"))


class CommandLine:
    """`megagrid …`, run in this process, which starts no ranks."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.folder = folder
        self._capsys = capsys

    def recipe(self, placement: Placement = ALONE, *parts: Sections) -> str:
        """T0 as a file; its run folder is `run`."""
        path = self.folder / "recipe.toml"
        path.write_text(dump(t0(self.run_folder, placement, *parts)), encoding="utf-8")
        return str(path)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def __call__(self, *arguments: str) -> Ended:
        self._capsys.readouterr()
        code = main(arguments)
        return Ended(code, *self._capsys.readouterr())

    def train(self, *parts: Sections) -> Ended:
        """Train T0 on this process."""
        return self("train", self.recipe(ALONE, *parts))

    def mistake(self, *arguments: str) -> str:
        """The one line that a command which can't be done is told off with."""
        ended = self(*arguments)
        assert ended.code == 2, ended
        (line,) = ended.err.splitlines()
        assert line.startswith("error: ")
        return line


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture) -> CommandLine:
    return CommandLine(tmp_path, capsys)


@pytest.fixture
def job(tmp_path: Path) -> Iterator:
    """Makes jobs, and leaves none of their processes behind."""
    made: list[Job] = []

    def make(*args, name: str = "job", **keys) -> Job:
        (tmp_path / name).mkdir()
        made.append(Job(tmp_path / name, *args, **keys))
        return made[-1]

    yield make
    for one in made:
        one.kill()
