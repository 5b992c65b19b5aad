"""Memory by its storages: how much is live, the most that ever was, and what it was made of then.

A tracker watches torch's dispatcher while it is entered. A storage counts from the operator that
makes it until nothing refers to it any more; resizing one, as FSDP does to gather and to let go of
parameters, counts as well. What is a storage is the same for real tensors and for fake ones, so the
same tracker measures both.

             op makes it      resize_(0)   resize_(n)        last reference dies
    bytes     |==================|            |==================|

A storage lies on the device or on the host. Where the host is the device, as on a CPU, whoever
knows says which of the two it stands for: at the latest when a peak is looked at.

Not seen: what an operator takes and gives back within itself (workspaces of matrix products), the
fragmentation of an allocator, communicators' buffers, a device's context, memory outside tensors.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
        place: what it counts on.
        kind: what it holds; told by `Tracker.label`, perhaps long after it was made.
    """

    bytes: int
    number: int
    op: str
    place: Place
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


@dataclass
class Place:
    """Memory that storages lie in.

    Attributes:
        live_bytes: of all that exist.
        peak: since the last `Tracker.reset_peaks`.
    """

    live_bytes: int = 0
    peak: Peak = field(default_factory=Peak)


class Tracker(TorchDispatchMode):
    """Counts storages on one type of device while entered.

    Args:
        device_type: of the tensors that count.
        at_peak: called whenever more is live than ever since `reset_peaks`, before a peak is
            noted: the moment to label what changes its owner, or its place, in the course of a
            step.
        granularity: storages are rounded up to multiples of it, as an allocator would.

    Attributes:
        device, host: the two places.
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
        self.device, self.host = Place(), Place()
        self.where: Any = None
        self._device_type = device_type
        self._at_peak = at_peak
        self._granularity = granularity
        self._live: dict[int, tuple[Record, weakref.ref]] = {}
        self._made = 0
        self._place_of_new = self.device
        self._is_noting = False

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

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What the block makes lies there."""
        self._place_of_new = self.host
        yield
        self._place_of_new = self.device

    def reset_peaks(self) -> None:
        """Begin to look for new peaks, from what is live now."""
        for place in (self.device, self.host):
            place.peak = Peak()
        self._note_peaks()

    def live_by_kind(self, place: Place) -> dict[str, int]:
        """Bytes of what is live there now, by kind."""
        return _by_kind(self._parts(place))

    def label(self, kind: str, tensors: Iterable[torch.Tensor], place: Place | None = None) -> None:
        """Say what the storages of `tensors` hold, and where they lie (None: where they did so
        far); those that haven't been seen count from now."""
        for tensor in tensors:
            if tensor.device.type == self._device_type:
                record = self._see(tensor, place=place)
                record.kind = kind
                if place is not None and record.place is not place:
                    self._move(record, place)

    def label_since(self, number: int, kind: str) -> None:
        """The same for what is live, has been made since there were `number`, and has no label."""
        for record, _ in reversed(list(self._live.values())):
            if record.number < number:
                break
            if record.kind == TEMPORARY:
                record.kind = kind

    def _see(self, tensor: torch.Tensor, op: Any = "", place: Place | None = None) -> Record:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None:
            record = Record(0, self._made, str(op), place or self._place_of_new)
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
        record.place.live_bytes += size - record.bytes
        record.bytes = size
        self._look_at(record.place)

    def _move(self, record: Record, place: Place) -> None:
        record.place.live_bytes -= record.bytes
        place.live_bytes += record.bytes
        record.place = place
        self._look_at(place)

    def _look_at(self, place: Place) -> None:
        if place.live_bytes > place.peak.bytes and not self._is_noting:
            self._note_peaks()

    def _note_peaks(self) -> None:
        self._is_noting = True
        self._at_peak()
        self._is_noting = False
        for place in (self.device, self.host):
            if place.live_bytes > place.peak.bytes:
                place.peak = Peak(place.live_bytes, self.where, self._parts(place))

    def _parts(self, place: Place) -> list[tuple[Record, int]]:
        # A list first: while it is gone through, garbage may be collected, storages among it.
        records = [record for record, _ in list(self._live.values())]
        return [(record, record.bytes) for record in records if record.place is place]

    def _forget(self, key: int) -> None:
        record, _ = self._live.pop(key)
        record.place.live_bytes -= record.bytes

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
