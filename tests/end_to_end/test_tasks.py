"""Runs whose ranks are SLURM's tasks, told by the variables that srun sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrid.train.metrics import read_records

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny-llama-tp2pp2.toml")


def start(folder: Path, job: int, nodes: list[int], *overrides: str) -> list[subprocess.Popen[str]]:
    """The tasks of a job's only step, each on the node of that number."""
    names = [f"node{node}" for node in nodes]
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_STEP_NUM_NODES": str(len(set(nodes))),
        "SLURM_NTASKS": "8",  # of the job, whose steps can be of fewer
        "OMP_NUM_THREADS": "1",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER"))}
    command = [sys.executable, "-m", "megagrid", "train", RECIPE, "train.steps=2"]
    return [
        subprocess.Popen(
            [*command, f"logging.run_dir={folder}", *overrides],
            env={
                **inherited,
                **step,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(nodes[:rank].count(node)),
                "SLURM_NODEID": str(node),
                "SLURMD_NODENAME": names[rank],
            },
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.slow
def test_two_jobs_on_one_host_train_at_once_in_whatever_order_their_tasks_are(tmp_path):
    """Job ids whose ports would be the same, made as job id mod 1000."""
    cyclic = start(tmp_path / "four", 1500, [0, 1, 0, 1])
    pair = start(tmp_path / "two", 2500, [0, 0], "parallel.pipeline_parallel_size=1")
    said = [task.communicate(timeout=240) for task in (*cyclic, *pair)]
    assert [task.returncode for task in (*cyclic, *pair)] == [0] * 6, said
    assert "0 to 3 are the launcher's 0 2 1 3" in said[0][0]
    assert [out for rank, (out, _) in enumerate(said) if rank not in (0, 4)] == [""] * 4
    four, two = (list(read_records(tmp_path / name / "metrics.jsonl")) for name in ("four", "two"))
    assert [step.step for step in four] == [1, 2]
    for one, other in zip(four, two, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert not list(tmp_path.rglob(".rendezvous"))
