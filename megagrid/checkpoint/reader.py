"""Rectangles of a checkpoint's tensors, read as numpy arrays, whatever grid has cut them.

For tools, which have neither ranks nor torch. Files are read, not mapped: mapped pages would count
as memory, and a file that shrinks meanwhile would kill the process instead of raising.

    saved in four boxes                  wanted

    +-----------+-----------+            +---+-----------+
    |  file 0   |  file 1   |   ----->   |   |           |   from the four of them, which are read
    +-----------+-----------+            +---+-----------+   in whole rows, a few MiB at a time
    |  file 2   |  file 3   |            |   |           |
    +-----------+-----------+            +---+-----------+
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megagrid.checkpoint.manifest import Manifest, SavedBox
from megagrid.errors import CheckpointError

CHUNK = 8 << 20
"""Bytes that are read at once, unless a row has more."""


@dataclass(frozen=True)
class Number:
    """How a dtype of the manifest is read.

    Attributes:
        code: its name in a safetensors header.
        bits: unsigned integers of its width, which hold its bits unchanged.
        values: how numpy calls it; None for bfloat16, which it doesn't have.
    """

    code: str
    bits: np.dtype
    values: np.dtype | None


NUMBERS = MappingProxyType(
    {
        "float64": Number("F64", np.dtype("<u8"), np.dtype("<f8")),
        "float32": Number("F32", np.dtype("<u4"), np.dtype("<f4")),
        "float16": Number("F16", np.dtype("<u2"), np.dtype("<f2")),
        "bfloat16": Number("BF16", np.dtype("<u2"), None),
        "int64": Number("I64", np.dtype("<u8"), np.dtype("<i8")),
        "int32": Number("I32", np.dtype("<u4"), np.dtype("<i4")),
        "uint8": Number("U8", np.dtype("<u1"), np.dtype("<u1")),
    }
)
"""By the manifest's name of the dtype."""


def to_float64(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that `bits` of the manifest's `dtype` stand for."""
    values = NUMBERS[dtype].values
    if values is None:  # bfloat16 is the upper half of a float32
        bits, values = bits.astype("<u4") << np.uint32(16), np.dtype("<f4")
    with np.errstate(invalid="ignore"):  # a signalling NaN, which becomes a quiet one
        return bits.view(values).astype(np.float64)


class TensorReader:
    """Reads the tensors that `manifest` lists from the files in `folder`.

    Raises:
        CheckpointError: a file isn't what the manifest says.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        for name, tensor in manifest.tensors.items():
            if tensor.dtype not in NUMBERS:
                raise CheckpointError(
                    f"{folder}: {name} is {tensor.dtype}, which isn't known here; known are "
                    f"{', '.join(NUMBERS)}"
                )
        self.folder = folder
        self.manifest = manifest
        self._headers: dict[str, dict[str, _Place]] = {}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """The rectangle `sizes` at `offsets` of the tensor `name`, as the bits of its dtype."""
        tensor = self.manifest.tensors[name]
        wanted = _Rectangle.of(offsets, sizes)
        values = np.empty(wanted.sizes, NUMBERS[tensor.dtype].bits)
        filled = 0
        for box in tensor.boxes:
            common = wanted.overlap(_Rectangle.of(box.offsets, box.sizes))
            if common is not None:
                part = values[common.slices(wanted)]
                self._read_box(name, tensor.dtype, box, common, part)
                filled += part.size
        if filled != values.size:
            raise CheckpointError(f"{self.folder} doesn't hold all of {name}")
        return values.reshape(tuple(sizes))

    def _read_box(
        self, name: str, dtype: str, box: SavedBox, common: _Rectangle, target: np.ndarray
    ) -> None:
        """Fill `target` with the part `common` of a box, out of whole rows of it."""
        bits = NUMBERS[dtype].bits
        begin = self._begin(name, dtype, box)
        whole = _Rectangle.of(box.offsets, box.sizes)
        rows, *columns = common.slices(whole)
        row_shape = whole.sizes[1:]
        row_bytes = math.prod(row_shape) * bits.itemsize
        step = max(1, CHUNK // row_bytes)
        path = self.folder / box.file
        try:
            with path.open("rb", buffering=0) as file:
                for first in range(rows.start, rows.stop, step):
                    count = min(step, rows.stop - first)
                    at = begin + first * row_bytes
                    data = _read_exactly(file.fileno(), count * row_bytes, at)
                    read = np.frombuffer(data, bits).reshape(count, *row_shape)
                    done = first - rows.start
                    target[done : done + count] = read[:, *columns]
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
        except EOFError:
            raise CheckpointError(f"{path} is damaged: it ends within {name}") from None

    def _begin(self, name: str, dtype: str, box: SavedBox) -> int:
        """Where the box of `name` begins in its file, in bytes, if the file agrees on the box."""
        path = self.folder / box.file
        if box.file not in self._headers:
            self._headers[box.file] = _read_header(path)
        place = self._headers[box.file].get(name)
        if place is None or (place.code, place.shape) != (NUMBERS[dtype].code, box.sizes):
            raise CheckpointError(
                f"{path} is damaged: its header doesn't have the {dtype} box of {name} that the "
                "manifest says it has"
            )
        return place.begin


@dataclass(frozen=True)
class _Rectangle:
    """Where it begins and ends in the global tensor. A number without dims is a row of one."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, offsets: Sequence[int], sizes: Sequence[int]) -> _Rectangle:
        if not sizes:
            return cls((0,), (1,))
        stops = (offset + size for offset, size in zip(offsets, sizes, strict=True))
        return cls(tuple(offsets), tuple(stops))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    def overlap(self, other: _Rectangle) -> _Rectangle | None:
        """What the two have in common; None if nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        is_empty = any(start >= stop for start, stop in zip(starts, stops, strict=True))
        return None if is_empty else _Rectangle(starts, stops)

    def slices(self, whole: _Rectangle) -> tuple[slice, ...]:
        """Where it lies in an array of `whole`."""
        bounds = zip(self.starts, self.stops, whole.starts, strict=True)
        return tuple(slice(start - at, stop - at) for start, stop, at in bounds)


@dataclass(frozen=True)
class _Place:
    """What a file's header says of a tensor; `begin` in bytes from the file's start."""

    code: str
    shape: tuple[int, ...]
    begin: int


def _read_header(path: Path) -> dict[str, _Place]:
    """The header of a safetensors file by tensor.

    Raises:
        CheckpointError: the file doesn't begin with one.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(_read_exactly(file.fileno(), 8, 0), "little")
            data_begins = 8 + length
            if data_begins > size:
                raise ValueError(f"a header of {length} bytes doesn't fit into {size}")
            header: dict[str, Any] = json.loads(_read_exactly(file.fileno(), length, 8))
        places = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - data_begins:
                raise ValueError(f"{name} lies outside of it")
            places[name] = _Place(entry["dtype"], tuple(entry["shape"]), data_begins + int(begin))
        return places
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except EOFError:
        raise CheckpointError(f"{path} is damaged: it ends within its header") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _read_exactly(descriptor: int, length: int, begin: int) -> bytes:
    """`length` bytes from `begin` on; one call of the system reads 2 GiB at most.

    Raises:
        EOFError: there are fewer.
    """
    parts = []
    while length:
        data = os.pread(descriptor, length, begin)
        if not data:
            raise EOFError
        parts.append(data)
        length, begin = length - len(data), begin + len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
