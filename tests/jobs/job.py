"""launch/slurm.sbatch where there is no SLURM: commands of its that write down their calls."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "launch/slurm.sbatch"

SRUN = """\
#!/usr/bin/env bash
echo "$@" >>srun.calls
while [[ $1 != *.log ]]; do shift; done
log=${1/\\%t/0}
shift
tell() { ((code > 127)) || echo "srun: error: node01: task 0: Exited with exit code $code" >&2; }
trap 'code=$?; tell' EXIT
source ./ranks >"$log" 2>&1
"""
"""Runs what the test says of the ranks, with their arguments; its output is the first one's."""

SCONTROL = """\
#!/usr/bin/env bash
echo "$@" >>scontrol.calls
case "$1 $2" in
    'show job') echo "JobId=7 JobState=$(<state) Reason=None" ;;
    'show node') echo 'NodeName=node01 NodeAddr=10.0.0.1 Port=1' ;;
esac
"""

PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    -c*tomllib*) echo run ;;
    -c*create_server*) echo $((20000 + $(wc -l <srun.calls))) ;;
esac
"""
"""A Python that takes no time to say where the run's folder is, or a port that is free."""

SAVE = "mkdir -p run/checkpoints/step-00000004; echo >run/checkpoints/step-00000004/manifest.json\n"
EXITED = "echo 'srun: error: node02: task 2: Exited with exit code {}' >>run/jobs/7/7.0/srun.log\n"
"""What srun says of the ranks that end first; those that it then kills have other codes."""


@dataclass(frozen=True)
class Ended:
    """How a start of the job ended.

    Attributes:
        code: the script's.
        out: what the job says.
        requeued: jobs that it has had requeued.
        ranks: the command of the step.
    """

    code: int
    out: str
    err: str
    requeued: list[str]
    ranks: str


class FakeJob:
    """A job in `folder`, whose run has the folder `run` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "fast-python": PYTHON}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "state").write_text("RUNNING")
        self.starts = 0

    def environment(self, **others: str) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "MEGAGRID_PYTHON": "fast-python",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[01-02]",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_CPUS_PER_NODE": "12,8(x3)",
            "SLURMD_NODENAME": "node01",
            "SLURM_RESTART_COUNT": str(self.starts),
        } | others

    def start(
        self,
        ranks: str,
        *overrides: str,
        script: Path = SCRIPT,
        state: str = "RUNNING",
        recipe: str | None = "recipe.toml",
        **environment: str,
    ) -> Ended:
        """Start it once more.

        Args:
            ranks: what they do, in bash.
            state: of the job, when the ranks have ended.
        """
        for name in ("srun.calls", "scontrol.calls"):
            (self.folder / name).write_text("")
        (self.folder / "ranks").write_text(ranks)
        (self.folder / "state").write_text(state)
        done = subprocess.run(
            ["bash", str(script), *([recipe] if recipe else []), *overrides],
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.starts += 1
        calls = (self.folder / "scontrol.calls").read_text().splitlines()
        return Ended(
            done.returncode,
            done.stdout,
            done.stderr,
            [call.split()[1] for call in calls if call.startswith("requeue")],
            (self.folder / "srun.calls").read_text(),
        )


RECIPE = """\
[model]
preset = "tiny-llama"

[parallel]
tensor_parallel_size = 2

[train]
seq_length = 64
global_batch_size = 8
steps = 8
device = "cpu"

[optimizer]
lr = 1e-3

[data]
paths = ["synthetic"]

[logging]
run_dir = "run"
"""
