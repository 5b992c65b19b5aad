"""What is still in memory of what was computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kept(TorchDispatchMode):
    """Watches the storages of all results while entered.

    Args:
        known: tensors that were there before, whose storages don't count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # holds the address, so that it isn't reused
                self._seen[reference.cdata] = reference, storage.nbytes()
        return result

    def bytes(self) -> int:
        """Of those storages that something still refers to."""
        return sum(
            size
            for address, (reference, size) in self._seen.items()
            if address not in self._known and not reference.expired()
        )
