"""A rank without peers, and tensors without memory.

Collectives of torch's fake process group return at once and change nothing. Fake tensors have a
shape, a dtype and a device, and go through the same operators as real ones, which compute shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megagrid.config.schema import Config
from megagrid.grid.grid import Grid
from megagrid.grid.placement import Placement
from megagrid.grid.start import grid_of


@contextmanager
def fake_grid(config: Config, placement: Placement, rank: int, device: str) -> Iterator[Grid]:
    """The grid as `rank` sees it, whose other ranks aren't there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=placement.world_size)
    try:
        yield grid_of(config, placement, rank, device, host_backend="fake")
    finally:
        # DTensor remembers what its ops return, with the meshes; one of the next grid that looks
        # the same would be taken for this one's, whose groups are gone.
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


class ReadsZero(TorchDispatchMode):
    """Answers 0 to whoever reads a number off a fake tensor: a step reads its loss, its norm and
    its counts, and to none of them zero means that anything is wrong.

    Entered after the mode that makes tensors fake.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the op; if it depends on data that isn't there, it is `Tensor.item`."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0
