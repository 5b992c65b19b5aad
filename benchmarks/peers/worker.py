"""The step loop of one rank, for systems that don't bring their own.

`python -m benchmarks.peers.worker SYSTEM JOB.json`, with RANK, WORLD_SIZE, … set when there is more
than one rank. Rank 0 writes a line a step to `job.metrics`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.peers.spec import Job

BUILDERS = {
    "transformers": "benchmarks.peers.systems.transformers_llama",
    "native": "benchmarks.peers.systems.native.trainer",
}


class Trainer(Protocol):
    """A model with its optimizer. The module that `BUILDERS` names has `build(job) -> Trainer`."""

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """One update on the global batch, int64 [global_batch_size, seq_length + 1].

        Returns the mean loss over the global batch and the gradient norm before clipping, the same
        on every rank: reading them is what ends the step, so no rank runs ahead of the clock.
        """
        ...


def train(job: Job, trainer: Trainer, rank: int) -> None:
    """Runs `recipe.steps` steps; the time of one spans batch to updated weights and known loss."""
    # Mapped, not read: a rank touches only the pages of the batch that it trains on.
    batches = np.load(job.tokens, mmap_mode="r")
    with open(job.metrics if rank == 0 else os.devnull, "w") as metrics:
        for step in range(job.recipe.steps):
            started = time.perf_counter()
            loss, grad_norm = trainer.step(torch.from_numpy(batches[step].copy()))
            seconds = time.perf_counter() - started
            record = {
                "step": step + 1,
                "loss": loss,
                "grad_norm": grad_norm,
                "step_time_s": seconds,
                "tokens_per_s": job.recipe.tokens_per_step / seconds,
            }
            print(json.dumps(record), file=metrics, flush=True)


def main() -> None:
    """One rank from process group to last step."""
    system, path = sys.argv[1:]
    job = Job.load(path)
    rank = int(os.environ.get("RANK", 0))
    if job.layout.world_size > 1:
        dist.init_process_group("gloo")
    try:
        train(job, importlib.import_module(BUILDERS[system]).build(job), rank)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
