"""One training step of any system's rank under torch.profiler.

`python -m benchmarks.peers.profiled TABLES WARMUP MODULE …` runs MODULE as `python -m` does, and
profiles the time between two ends of the optimizer's step, of which torch lets everyone know: the
system needs no hook of its own. Rank 0 writes two tables to the file TABLES: operators by self CPU
time, and what moves data between ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import EventList
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

ROWS = 25
COMMUNICATION = ("gloo:", "c10d::", "_c10d_functional::", "nccl:", "record_param_comms")


class OneStep:
    """Profiles from the end of optimizer step `warmup` to the end of the next."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._optimizer: Optimizer | None = None
        self._steps = 0
        # Backward and gloo work on threads of their own.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        self.profile = profile(
            activities=[ProfilerActivity.CPU], experimental_config=everywhere, acc_events=True
        )

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return  # a system may have several optimizers; one of them counts the steps
        self._steps += 1
        if self._steps == self._warmup:
            self.profile.start()
        elif self._steps == self._warmup + 1:
            self.profile.stop()

    @property
    def complete(self) -> bool:
        return self._steps > self._warmup


def tables(events: EventList) -> str:
    """The top operators by self CPU time, and all communication, with calls and time."""
    moving = EventList(
        [event for event in events if event.key.startswith(COMMUNICATION)], use_device=None
    )
    width = {"row_limit": ROWS, "max_name_column_width": 60}
    parts = ["operators by self CPU time", events.table(sort_by="self_cpu_time_total", **width)]
    if moving:
        parts += ["communication", moving.table(sort_by="cpu_time_total", **width)]
    return "\n".join(parts)


def main() -> None:
    """Runs the module in this process with the hook in place."""
    out, warmup, module, *arguments = sys.argv[1:]
    step = OneStep(int(warmup))
    hook = register_optimizer_step_post_hook(step)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:  # a command line's ordinary way to finish
        if end.code not in (None, 0):
            raise
    finally:
        hook.remove()
    if not step.complete:
        raise SystemExit(f"error: {module} ended before optimizer step {int(warmup) + 1}")
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(tables(step.profile.key_averages()))


if __name__ == "__main__":
    main()
