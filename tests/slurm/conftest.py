"""One cluster for all tests that need one, started by the first of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megagrid.config.dump import dump
from megagrid.grid.placement import Placement
from tests.end_to_end.t0 import Sections, Trainer, t0
from tests.ranks import Ranks
from tests.slurm.cluster import Cluster, why_no_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@contextmanager
def running_cluster(**how: str | int) -> Iterator[Cluster]:
    """A cluster while the block runs; skips the test where there can't be one."""
    if reason := why_no_cluster():
        pytest.skip(reason)
    # munged wants a folder that everybody can enter, which pytest's aren't.
    with tempfile.TemporaryDirectory(prefix="megagrid-slurm-") as folder:
        Path(folder).chmod(0o755)
        cluster = Cluster(Path(folder), **how)
        installed = cluster.tool("install")
        if installed.returncode:
            why = (installed.stderr.splitlines() or ["apt-get failed"])[-1]
            pytest.skip(f"{why}: see ./tools/slurm_cluster.sh install")
        try:
            started = cluster.tool("start", timeout=120)
            if started.returncode:
                why = (started.stderr.splitlines() or ["no word of a reason"])[-1]
                pytest.skip(f"SLURM doesn't start here ({why}): see ./tools/slurm_cluster.sh start")
            yield cluster
        finally:
            cluster.tool("stop", timeout=120)


@pytest.fixture(scope="session")
def trainer(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(ranks, tmp_path_factory.mktemp("local"))


@pytest.fixture
def recipe(tmp_path: Path):
    """Writes T0 into a folder of its own, for a run in `run` there."""

    def write(placement: Placement, *parts: Sections, name: str = "job") -> Path:
        path = tmp_path / name / "recipe.toml"
        path.parent.mkdir()
        path.write_text(dump(t0("run", placement, *parts)), encoding="utf-8")
        return path

    return write
