"""Dropout whose mask is a function of seed, step, sample, place in the model and element.

Every grid drops the same elements: a tensor-parallel rank those of its heads, a sequence-parallel
rank those of its tokens; a recomputation or a resumed run draws the same masks again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megagrid.nn import hashing


@dataclass(frozen=True)
class DropoutStreams:
    """What distinguishes this forward's masks from those of other samples and steps.

    Attributes:
        seed, step: of the run.
        sample_ids: (b,) int64, the run's number of each sample in the microbatch.
    """

    seed: int
    step: int
    sample_ids: Tensor

    def of(self, place: str) -> Tensor:
        """(b,) keys for one place in the model, by its global name."""
        return hashing.bits(hashing.key(self.seed, "dropout", self.step, place), self.sample_ids)


def dropout(x: Tensor, rate: float, keys: Tensor | None, places: Tensor) -> Tensor:
    """Zero elements of `x` with probability `rate`, scale the others by 1 / (1 - rate).

    Args:
        x: (s, b, h).
        keys: (b,), from `DropoutStreams.of`; None switches dropout off (evaluation).
        places: (s,) int64, where in their samples the tokens lie.
    """
    if rate == 0.0 or keys is None:
        return x
    h = x.shape[-1]
    index = places.view(-1, 1, 1) * h + torch.arange(h, device=x.device)
    kept = hashing.keep(keys.view(1, -1, 1), index, 1.0 - rate)
    return x * (kept.to(x.dtype) / (1.0 - rate))


def attention_dropout(
    probabilities: Tensor, rate: float, keys: Tensor, first_head: int, queries: Tensor
) -> Tensor:
    """The same for attention probabilities (b, heads, n, s), heads from `first_head` on, of the
    tokens at `queries` (n,) of their samples to all tokens of them."""
    _, heads, _, columns = probabilities.shape
    device = probabilities.device
    head = torch.arange(first_head, first_head + heads, device=device).view(-1, 1, 1)
    index = (head * columns + queries.view(-1, 1)) * columns + torch.arange(columns, device=device)
    kept = hashing.keep(keys.view(-1, 1, 1, 1), index, 1.0 - rate)
    return probabilities * (kept.to(probabilities.dtype) / (1.0 - rate))
