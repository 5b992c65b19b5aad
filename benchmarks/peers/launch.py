"""One process group from start to end: started, watched, timed out, and nothing left behind.

All systems are started and watched by this code, from outside: `python -m MODULE` for one process,
torchrun for more, and the kernel's own high-water mark of each rank's resident memory. Linux only,
since it reads /proc. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.spec import Job
from benchmarks.peers.systems import Entry

RUN_MARK = "PEERS_RUN"
"""Environment variable that all processes of a run carry, with the run's own value: torchrun puts
ranks into sessions of their own, so neither parent nor process group finds them all."""

POLL_SECONDS = 0.1


class RunError(Exception):
    """A process group ended wrong or ran out of time; the message has the end of its log."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    records: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    seconds_to_first_step: float
    """From starting the process group to its first record on disk, to `POLL_SECONDS`."""
    peak_rss_bytes: list[int]
    """High-water mark of resident memory, by rank: interpreter, libraries and training."""


def execute(job: Job, entry: Entry, threads: int, time_limit_s: float) -> Outcome:
    """Runs `entry` on `job.layout.world_size` ranks with `threads` threads each."""
    world = job.layout.world_size
    job.metrics.parent.mkdir(parents=True, exist_ok=True)
    job.metrics.unlink(missing_ok=True)
    log = job.metrics.with_name("output.log")
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command(entry, world),
            env=environment(mark, threads),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    first_step = None
    memory = MemoryWatch(mark, world)
    try:
        while process.poll() is None:
            now = time.monotonic() - started
            if first_step is None and has_line(job.metrics):
                first_step = now
            memory.sample()
            if now > time_limit_s:
                raise RunError(f"no end after {time_limit_s:.0f} s\n{tail(log)}")
            time.sleep(POLL_SECONDS)
        if process.returncode != 0:
            raise RunError(f"exit code {process.returncode}\n{tail(log)}")
    finally:
        stop(process, mark)
    records = [json.loads(line) for line in job.metrics.read_text().splitlines()]
    if first_step is None or not records:
        raise RunError(f"no records in {job.metrics}\n{tail(log)}")
    return Outcome(records, first_step, memory.peaks())


def command(entry: Entry, world: int) -> list[str]:
    """torchrun's `--standalone` asks the kernel for a free port, so two runs never meet."""
    run = [entry.module, *entry.arguments]
    if world == 1:
        return [sys.executable, "-m", *run]
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", *torchrun, f"--nproc-per-node={world}", "-m", *run]


def environment(mark: str, threads: int) -> dict[str, str]:
    """This process's environment without any rank's, and with what holds for every system."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in ranks}
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {
        RUN_MARK: mark,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        # Otherwise gloo resolves the host's name, which may lead to an interface that is down.
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


class MemoryWatch:
    """Peak resident memory of each rank of a run, read from /proc as the run goes."""

    def __init__(self, mark: str, world: int) -> None:
        self._mark, self._world = mark, world
        self._pids: dict[int, int] = {}
        self._peaks: dict[int, int] = {}

    def sample(self) -> None:
        # Looking for ranks reads every process's environment: only until all are found.
        if len(self._pids) < self._world:
            self._find()
        for rank, pid in self._pids.items():
            peak = high_water_mark(pid)
            self._peaks[rank] = max(peak, self._peaks.get(rank, 0))

    def peaks(self) -> list[int]:
        return [self._peaks[rank] for rank in sorted(self._peaks)]

    def _find(self) -> None:
        # Ascending, and the first one stays: a rank's own helpers inherit its RANK.
        for pid, variables in sorted(marked(self._mark)):
            rank = variables.get("RANK", "0" if self._world == 1 else None)
            if rank is not None:
                self._pids.setdefault(int(rank), pid)


def high_water_mark(pid: int) -> int:
    """VmHWM of a process in bytes; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("VmHWM", "0 kB").split()[0]) * 1024


def marked(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Process id and environment of each living process of the run `mark`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            raw = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
        variables = {key: value for key, _, value in pairs}
        if variables.get(RUN_MARK) == mark:
            yield int(entry.name), variables


def stop(process: subprocess.Popen[bytes], mark: str, patience_s: float = 5.0) -> None:
    """Ends what is left of the run: asked first, killed when it doesn't listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in marked(mark):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            process.poll()  # reaps it, so that it leaves /proc
            if not any(marked(mark)):
                return
            time.sleep(POLL_SECONDS)


def has_line(path: Path) -> bool:
    """Whether the file exists and isn't empty."""
    return path.exists() and path.stat().st_size > 0


def tail(path: Path, lines: int = 30) -> str:
    """The end of a log, for an error message."""
    text = path.read_text(errors="replace").splitlines()
    return "\n".join([f"last lines of {path}:", *text[-lines:]])
