"""Which samples a rank reads in a step: arithmetic, the same on every grid.

The samples of a run are numbered 0, 1, 2, … across its epochs. A step takes the next
``global_batch_size`` of them, whatever the grid; the grid only says who computes which. With global
batch 8, microbatch 2, DP 2:

    position in the step    0 1 | 2 3 | 4 5 | 6 7
    data-parallel rank       0  |  1  |  0  |  1
    microbatch               0  |  0  |  1  |  1

Microbatches lie outermost, so a batch that the data can't fill is short on all ranks alike. The
cursor of a run is the number of samples consumed, never of steps or batches: a resumed run may
change its global batch and still go on with the next unseen sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrid.errors import ConfigError


@dataclass(frozen=True)
class Sampler:
    """The arithmetic above.

    Errors: ConfigError where the microbatches of all ranks don't add up to the global batch.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        one_round = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size < 1 or one_round < 1 or self.global_batch_size % one_round:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} must be a positive multiple of "
                f"train.micro_batch_size={self.micro_batch_size} x data-parallel size "
                f"{self.data_parallel_size} = {one_round}"
            )

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def sample_ids(self, consumed_samples: int, dp_rank: int) -> np.ndarray:
        """What ``dp_rank`` reads in the step after ``consumed_samples``.

        int64 [microbatches, micro_batch_size].
        """
        shape = (self.microbatches, self.data_parallel_size, self.micro_batch_size)
        positions = np.arange(self.global_batch_size, dtype=np.int64).reshape(shape)
        return consumed_samples + positions[:, dp_rank]

    def full_steps(self, samples: int | None, consumed_samples: int = 0) -> int | None:
        """Steps that ``samples`` still fill after ``consumed_samples``; None: without end.

        A function of numbers that all ranks know, so all of them stop after the same step.
        """
        if samples is None:
            return None
        return max(samples - consumed_samples, 0) // self.global_batch_size
