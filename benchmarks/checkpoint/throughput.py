"""Saves and loads of the same bytes by megagrid, by torch.save and by dd, in turns.

    parent process     for 1, 2 and 4 ranks: starts them through torchrun
      rank 0, 1, …     `measure`:   megagrid torch dd megagrid torch dd …

Each turn saves, loads what isn't in memory any more, and loads what is. Whoever saves is done when
the bytes are on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.launch import environment as run_environment
from megagrid.config.rules import check
from megagrid.config.schema import Config

ACTS = ("save", "load from disk", "load from memory")
OTHERS = ("torch.save", "dd")
"""What megagrid is held against."""

BLOCK = 8 << 20


@dataclass(frozen=True)
class Setting:
    """What is saved: a Llama and its AdamW states in fp32, over the dp axis.

    Attributes:
        rounds: turns of each way, after one that doesn't count.
    """

    ranks: int = 1
    layers: int = 8
    hidden: int = 512
    vocabulary: int = 8192
    rounds: int = 5

    @property
    def config(self) -> Config:
        config = Config(
            model={
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "ffn_hidden_size": self.hidden * 11 // 4,
                "num_heads": 8,
                "num_kv_heads": 2,
                "head_dim": self.hidden // 8,
                "vocab_size": self.vocabulary,
                "max_seq_length": 64,
            },
            parallel={"data_parallel_size": self.ranks},
            train={
                "seq_length": 64,
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "steps": 1,
                "device": "cpu",
            },
            data={"paths": ["synthetic"], "valid_fraction": 0.0},
            logging={"run_dir": "unused"},
        )
        check(config, self.ranks)
        return config


@dataclass(frozen=True)
class Measurement:
    """What one group of ranks has measured.

    Attributes:
        bytes: of the files of a save, by way.
        seconds: by way and act, of each round.
        load_before: load average over the minute before.
    """

    ranks: int
    bytes: dict[str, int]
    seconds: dict[str, dict[str, list[float]]]
    load_before: float

    def speeds(self, way: str, act: str) -> list[float]:
        """10^6 bytes a second, by round."""
        return [self.bytes[way] / 1e6 / seconds for seconds in self.seconds[way][act]]

    def ratios(self, other: str, act: str) -> list[float]:
        """Speed of megagrid over that of another way, by round."""
        pairs = zip(self.speeds("megagrid", act), self.speeds(other, act), strict=True)
        return [ours / theirs for ours, theirs in pairs]


# ------------------------------------------------------------------------------------------------
# On the ranks


class Way(Protocol):
    """A way to save and load. All ranks make each call together, and it ends for all."""

    def save(self) -> None: ...

    def load(self) -> None: ...

    def files(self) -> list[Path]:
        """Of this rank, or of all of them."""
        ...


class Megagrid:
    """What a run does: find, verify and load included."""

    def __init__(self, folder: Path, engine: Any) -> None:
        from megagrid import checkpoint

        self._checkpoint = checkpoint
        self._folder = folder
        self._world = engine.grid.host
        self._entries = checkpoint.entries(engine.shards, engine.optimizer)

    def save(self) -> None:
        self._checkpoint.save(self._folder, self._entries, {"step": 1}, world=self._world)

    def load(self) -> None:
        found = self._checkpoint.find_checkpoint(str(self._folder), self._folder, self._world)
        self._checkpoint.load(found.path, self._entries, world=self._world, is_verified=True)

    def files(self) -> list[Path]:
        return list(self._folder.glob("*/*"))


class Torch:
    """torch.save of the rank's tensors into a file of its own, and torch.load of that."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self._path = folder / f"rank-{engine.grid.rank}.pt"
        self._tensors = {"weights": [shard.tensor for shard in engine.shards]}
        optimizer = engine.optimizer
        self._tensors |= {name: optimizer.states(name) for name in optimizer.state_names}

    def save(self) -> None:
        import torch

        with self._path.open("wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        import torch

        torch.load(self._path, weights_only=True)

    def files(self) -> list[Path]:
        return [self._path]


class Dd:
    """As many bytes as the rank's, by the system's own tool: what the disk gives."""

    def __init__(self, folder: Path, engine: Any) -> None:
        from megagrid.checkpoint import entries

        self._path = folder / f"rank-{engine.grid.rank}.copy"
        self._source = folder.with_name(f"source-{engine.grid.rank}")
        size = sum(
            entry.tensor.numel() * entry.tensor.element_size()
            for entry in entries(engine.shards, engine.optimizer)
            if entry.is_written_here
        )
        with self._source.open("wb") as file:
            while left := size - file.tell():
                file.write(os.urandom(min(BLOCK, left)))

    def save(self) -> None:
        self._dd(f"if={self._source}", f"of={self._path}", "conv=fsync")

    def load(self) -> None:
        self._dd(f"if={self._path}", "of=/dev/null")

    def files(self) -> list[Path]:
        return [self._path]

    def _dd(self, *operands: str) -> None:
        subprocess.run(["dd", f"bs={BLOCK}", "status=none", *operands], check=True)


WAYS: dict[str, Callable[[Path, Any], Way]] = {"megagrid": Megagrid, "torch.save": Torch, "dd": Dd}
"""Way -> what makes it, of a folder and the rank's engine."""


def measure(setting: Setting, folder: Path, output: Path) -> None:
    """Make all turns; rank 0 writes what they took."""
    from megagrid.grid import bootstrap
    from megagrid.grid.start import meeting, running_grid
    from megagrid.train.build import build_engine

    config = setting.config
    with meeting(config, bootstrap.read()) as met, running_grid(config, met) as grid:
        engine = build_engine(setting.config, grid)
        for (
            name
        ) in engine.optimizer.state_names:  # zeros until the first step, which a disk may find easy
            for values in engine.optimizer.states(name):
                values.normal_()
        ways = {name: make(_made(folder / name), engine) for name, make in WAYS.items()}
        seconds = {name: {act: [] for act in ACTS} for name in ways}
        sizes = dict.fromkeys(ways, 0)
        for number in range(1 + setting.rounds):
            for name, way in ways.items():
                _clear(folder / name, grid.rank)
                times = _turn(way)
                if number == 0:
                    continue  # imports, and memory that is touched for the first time
                for act, taken in zip(ACTS, times, strict=True):
                    seconds[name][act].append(taken)
                sizes[name] = sum(p.stat().st_size for p in (folder / name).glob("**/*.*"))
    if grid.rank == 0:
        output.write_text(json.dumps({"bytes": sizes, "seconds": seconds}))


def _turn(way: Way) -> tuple[float, float, float]:
    """Seconds of each of `ACTS`."""
    save = _timed(way.save)
    for path in way.files():
        _forget(path)
    return save, _timed(way.load), _timed(way.load)


def _timed(work: Callable[[], None]) -> float:
    """Seconds until all ranks, which begin together, have done it."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def _forget(path: Path) -> None:
    """Let the system drop the file from memory, so that the next reader asks the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _clear(folder: Path, rank: int) -> None:
    """Remove what the last turn has written."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        folder.mkdir()
    dist.barrier()


# ------------------------------------------------------------------------------------------------
# Around them


def start(setting: Setting, disk: Path, time_limit_s: float) -> Measurement:
    """Run the ranks to their end, and clear up behind them.

    Raises:
        subprocess.SubprocessError: they failed, or took too long.
    """
    load = os.getloadavg()[0]
    folder = disk / f"ranks-{setting.ranks}"
    folder.mkdir()
    output = folder / "found.json"
    threads = max(1, (os.cpu_count() or 1) // setting.ranks)
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    rank = ["-m", "benchmarks.checkpoint.rank", json.dumps(asdict(setting)), str(folder)]
    subprocess.run(
        [sys.executable, "-m", *torchrun, f"--nproc-per-node={setting.ranks}", *rank, str(output)],
        env=run_environment(uuid.uuid4().hex, threads),
        check=True,
        timeout=time_limit_s,
    )
    found = json.loads(output.read_text())
    shutil.rmtree(folder)
    return Measurement(ranks=setting.ranks, load_before=load, **found)


def markdown(measurements: Sequence[Measurement]) -> str:
    """A row for each number of ranks and each act."""
    lines = [
        "| ranks | MB | | megagrid, MB/s (range) | torch.save | dd "
        "| megagrid / torch.save, by round | megagrid / dd, by round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in measurements:
        for act in ACTS:
            speeds = [_spread(found.speeds(way, act)) for way in ("megagrid", *OTHERS)]
            ratios = [
                f"{statistics.median(values):.2f}: {' '.join(f'{value:.2f}' for value in values)}"
                for values in (found.ratios(other, act) for other in OTHERS)
            ]
            size = f"{found.bytes['megagrid'] / 1e6:.0f}"
            lines.append("| " + " | ".join([str(found.ranks), size, act, *speeds, *ratios]) + " |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"
