"""Every act on the disk that a checkpoint's safety rests on: writing, syncing, renaming, checking.

A file, a new name and a removed name each survive a power cut only once they are synced: the file's
content by fsync of the file, the names by fsync of the folder that holds them.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

CHUNK = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file.

    Attributes:
        size: bytes.
        crc32: eight hex digits. A checksum guards against accidents, not against an adversary,
            who could change the manifest as well; CRC-32 is three times as fast as SHA-256.
    """

    size: int
    crc32: str


class ChecksummedFile:
    """A new file that is summed up as it is written and is on the disk when it is closed.

    Raises:
        OSError: that names the file, for a full disk too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: a full disk shows at the write, and close has nothing left to fail on.
        self._stream = path.open("xb", buffering=0)
        self._size = 0
        self._crc = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, f"{self._crc:08x}")

    def write(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)
        rest = memoryview(data)
        with self._named_errors():
            while rest:  # one call writes 2 GiB at most
                rest = rest[self._stream.write(rest) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stream, self._named_errors():
            if kind is None:
                os.fsync(self._stream.fileno())

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """The system names the file only in errors of opening it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def write_file(path: Path, data: bytes) -> FileRecord:
    """Make the file `path` of `data`, on the disk when this returns."""
    with ChecksummedFile(path) as file:
        file.write(data)
    return file.record


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copy `source` to the new file `target`, on the disk when this returns."""
    with source.open("rb") as stream, ChecksummedFile(target) as file:
        while data := stream.read(CHUNK):
            file.write(data)
    return file.record


def read_record(path: Path) -> FileRecord:
    """Size and checksum of the file as it lies there, read in small chunks."""
    size = crc = 0
    with path.open("rb") as stream:
        while data := stream.read(CHUNK):
            size += len(data)
            crc = zlib.crc32(data, crc)
    return FileRecord(size, f"{crc:08x}")


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give `source` the free name `target` beside it, for good."""
    os.rename(source, target)
    sync_folder(target.parent)


def remove_tree(folder: Path) -> None:
    """Remove `folder` and all in it. A crash leaves a part: give it a name that says so first."""
    shutil.rmtree(folder)
