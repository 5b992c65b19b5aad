"""Two runs of a recipe on one grid and one kind of device, bit by bit the same.

Data, weights and dropout are functions of the seed, and sums over ranks are taken in one order.
What is left are kernels that add up in the order in which threads arrive. On a CPU torch has none
that megagrid uses; on an accelerator they are switched off here, and by what the environment says
to its libraries (`megagrid.grid.bootstrap.make_deterministic`). Attention is among them:
scaled_dot_product_attention passes over the backends whose backward isn't deterministic, or has
them take a way that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_kernels(is_asked_for: bool) -> Iterator[None]:
    """In the block torch takes deterministic kernels, and raises where it has none.

    Memory that was never written to is filled with NaN, too: whoever reads it would see it.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_asked_for or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
