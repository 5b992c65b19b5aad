"""Memory by its storages: how much is live, the most that ever was, and what it was made of then.

A tracker watches torch's dispatcher while it is entered. A storage counts from the operator that
makes it until nothing refers to it any more; resizing one, as FSDP does to gather and to let go of
parameters, counts as well. What is a storage is the same for real tensors and for fake ones, so the
same tracker measures both.

             op makes it      resize_(0)   resize_(n)        last reference dies
    bytes     |==================|            |==================|

Not seen: what an operator takes and gives back within itself (workspaces of matrix products), the
fragmentation of an allocator, communicators' buffers, a device's context, memory outside tensors.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

TEMPORARY = "temporary"


@dataclass(eq=False)
class Record:
    """A storage that is, or was, live.

    Attributes:
        bytes: of it now.
        number: how many were made before it.
        op: the operator that made it; "" if it was there before.
        kind: what it holds; told by `Tracker.label`, perhaps long after it was made.
    """

    bytes: int
    number: int
    op: str
    kind: str = TEMPORARY


@dataclass
class Peak:
    """The most memory that was live at once, and what it was made of.

    Attributes:
        bytes: altogether.
        where: what the tracker's `where` was.
        parts: each storage's record, and its bytes then.
    """

    bytes: int = 0
    where: Any = None
    parts: list[tuple[Record, int]] = field(default_factory=list)

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, the largest first."""
        return _by_kind(self.parts)


class Tracker(TorchDispatchMode):
    """Counts storages on one type of device while entered.

    Args:
        device_type: of the tensors that count.
        at_peak: called whenever more is live than ever since `reset_peak`, before the peak is
            noted: the moment to label what changes its owner in the course of a step.
        granularity: storages are rounded up to multiples of it, as an allocator would.

    Attributes:
        live_bytes: of all storages that exist.
        peak: since the last `reset_peak`.
        where: what a new peak is marked with; anybody may set it.

    Only the thread that entered it is watched, and the backward that it starts.
    """

    def __init__(
        self,
        device_type: str,
        at_peak: Callable[[], None] = lambda: None,
        granularity: int = 1,
    ) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak = Peak()
        self.where: Any = None
        self._device_type = device_type
        self._at_peak = at_peak
        self._granularity = granularity
        self._live: dict[int, tuple[Record, weakref.ref]] = {}
        self._made = 0

    def __enter__(self) -> Tracker:
        """Watch the dispatcher, and `UntypedStorage.resize_`, which doesn't go through it."""
        self._resize = resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._set_size(storage)
            return result

        torch.UntypedStorage.resize_ = watched
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the op, then see what storages its results have."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors' ops come here again
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor) and item.device.type == self._device_type:
                self._see(item, func)
        return result

    @property
    def made(self) -> int:
        """Storages seen so far: the number of the next one."""
        return self._made

    def reset_peak(self) -> None:
        """Begin to look for a new peak, from what is live now."""
        self.peak = Peak()
        self._note_peak()

    def live_by_kind(self) -> dict[str, int]:
        """Bytes of what is live now, by kind."""
        return _by_kind(self._parts())

    def label(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what the storages of `tensors` hold; those that haven't been seen count from now."""
        for tensor in tensors:
            if tensor.device.type == self._device_type:
                self._see(tensor).kind = kind

    def label_since(self, number: int, kind: str) -> None:
        """The same for what is live, has been made since there were `number`, and has no label."""
        for record, _ in reversed(list(self._live.values())):
            if record.number < number:
                break
            if record.kind == TEMPORARY:
                record.kind = kind

    def _see(self, tensor: torch.Tensor, op: Any = "") -> Record:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None:
            record = Record(0, self._made, str(op))
            self._made += 1
            key = storage._cdata
            died = weakref.ref(storage, lambda _: self._forget(key))
            self._live[key] = record, died
            self._set_size(storage)
            return record
        if known[0].bytes != self._rounded(storage.nbytes()):
            self._set_size(storage)
        return known[0]

    def _set_size(self, storage: torch.UntypedStorage) -> None:
        record, _ = self._live[storage._cdata]
        size = self._rounded(storage.nbytes())
        self.live_bytes += size - record.bytes
        record.bytes = size
        if self.live_bytes > self.peak.bytes:
            self._note_peak()

    def _note_peak(self) -> None:
        self._at_peak()
        self.peak = Peak(self.live_bytes, self.where, self._parts())

    def _parts(self) -> list[tuple[Record, int]]:
        # A list first: while it is gone through, garbage may be collected, storages among it.
        return [(record, record.bytes) for record, _ in list(self._live.values())]

    def _forget(self, key: int) -> None:
        record, _ = self._live.pop(key)
        self.live_bytes -= record.bytes

    def _rounded(self, size: int) -> int:
        return -(-size // self._granularity) * self._granularity


class LettingGo(TorchDispatchMode):
    """Gives gloo's threads the time to let go of a message's tensors. They hold them for some
    microseconds beyond its end, which makes other peaks each time, and isn't the program's doing.

    Entered before a `Tracker`, which then sees what is gone.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Wait, then run the op."""
        time.sleep(1e-4)
        return func(*args, **(kwargs or {}))


def _by_kind(parts: Iterable[tuple[Record, int]]) -> dict[str, int]:
    sums: defaultdict[str, int] = defaultdict(int)
    for record, size in parts:
        sums[record.kind] += size
    return dict(sorted(sums.items(), key=lambda row: -row[1]))
