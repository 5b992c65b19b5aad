"""What autograd keeps of a layer, in host memory from its forward to its backward.

    device    forward 0 | forward 1 | forward 2 | …        … | backward 2 | backward 1 | backward 0
    to host             | layer 0   | layer 1   | layer 2
    to device                                                | layer 1    | layer 0

Copies run on a stream of their own, through pinned memory: a layer's leave while the next one
computes, and it is waited for before the one after that, so that never more than two layers' are on
the device; they come back while the layer behind is in its backward. A CPU makes the same copies
at once.

Whole storages are copied, once each, however many views of them are kept. Parameters, what a stage
hands to all of its layers, and storages of less than `LEAST_BYTES` stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 4096


class Lane:
    """Where copies between a device and the host are made, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def host_like(self, source: Tensor) -> Tensor:
        """Memory of the host for a copy of `source`."""
        return torch.empty_like(source, device="cpu", pin_memory=self._stream is not None)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy what the device has computed so far. On a device, both must live until
        `wait` has been called with a later `mark`."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.Event | None:
        """A point after all copies that have begun."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """What the device is given to do from now on comes after that point."""
        if mark is not None:
            torch.accelerator.current_stream(self.device).wait_event(mark)


@dataclass
class _Storage:
    """A storage that was moved to the host.

    Attributes:
        original: refers to it without keeping it, so that its address isn't another's.
        host: its bytes.
        views: of it that backward hasn't asked for yet.
        back: its bytes on the device again.
    """

    original: StorageWeakRef
    host: Tensor
    views: int = 0
    back: Tensor | None = None


@dataclass(frozen=True)
class _View:
    """What autograd keeps in place of a tensor."""

    storage: _Storage
    layer: _Layer
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class _Layer:
    """A layer of one forward.

    Attributes:
        before: the layer before it.
        stay: addresses of storages that aren't moved.
        storages: that were, by address and version.
        leaving: tensors that are being copied, and `left` the point after it.
        coming: the point after the copies back; None: they haven't begun.
    """

    lane: Lane
    before: _Layer | None
    stay: set[int]
    storages: dict[tuple[int, int], _Storage] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    left: torch.Event | None = None
    has_come: bool = False
    coming: torch.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage._cdata in self.stay or storage.nbytes() < LEAST_BYTES:
            return tensor
        reference = StorageWeakRef(storage)
        key = reference.cdata, tensor._version
        if key not in self.storages:
            source = _bytes_of(tensor)
            kept = _Storage(reference, self.lane.host_like(source))
            self.lane.copy(source, kept.host)
            self.leaving.append(source)
            self.storages[key] = kept
        kept = self.storages[key]
        kept.views += 1
        return _View(
            kept, self, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.fetch()
        self.lane.wait(self.coming)
        if self.before is not None:
            self.before.fetch()
        storage = kept.storage
        if storage.back is None:  # asked for once more than it was kept
            storage.back = storage.host.to(self.lane.device)
        view = storage.back.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)
        storage.views -= 1
        if storage.views <= 0:
            storage.back = None
        return view

    def fetch(self) -> None:
        """Begin to copy back all that the layer keeps, unless that has begun."""
        if self.has_come:
            return
        self.has_come = True
        for storage in self.storages.values():
            # Memory of the stream that computes: there it is used, and let go of.
            storage.back = torch.empty_like(storage.host, device=self.lane.device)
            self.lane.copy(storage.host, storage.back)
        self.coming = self.lane.mark()

    def let_go(self) -> None:
        """Of the device's memory, once it is copied."""
        self.lane.wait(self.left)
        self.leaving.clear()


class HostedForward:
    """A stage's forward whose layers keep what they need on the host.

    Args:
        stay: what all layers are given; it stays on the device.
    """

    def __init__(self, lane: Lane, stay: Iterable[Tensor]) -> None:
        self._lane = lane
        self._stay = {tensor.untyped_storage()._cdata for tensor in stay}
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, module: nn.Module) -> Iterator[None]:
        """What autograd keeps in the block, of a forward of `module`, goes to the host."""
        before, layer = self._last, _Layer(self._lane, self._last, set(self._stay))
        self._last = layer

        def pack(tensor: Tensor) -> Tensor | _View:
            if not layer.storages:  # in the forward, where gathered parameters are the module's
                of_parameters = (p.untyped_storage()._cdata for p in module.parameters())
                layer.stay.update(of_parameters)
            return layer.pack(tensor)

        with saved_tensors_hooks(pack, layer.unpack):
            yield
        layer.left = self._lane.mark()
        if before is not None:
            before.let_go()

    def end(self) -> None:
        """No layer follows."""
        if self._last is not None:
            self._last.let_go()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage of `tensor`, as bytes."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
