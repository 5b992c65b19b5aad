"""Raw text as files hold it: which files, and which documents are in them.

Reading finds where documents begin and end; decoding, which costs more, is left to the workers.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from megagrid.errors import DataError

_BLOCK_BYTES = 1 << 20
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class RawDocument(NamedTuple):
    """One document as its file holds it."""

    path: str
    line: int
    """Where it starts, from 1."""
    raw: bytes

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


class Block(NamedTuple):
    """Documents that are decoded together, and how many bytes they took in their files."""

    documents: list[RawDocument]
    decode: Callable[[RawDocument, Decoding], str]
    stored_bytes: int


@dataclass(frozen=True)
class Decoding:
    """How documents become text."""

    json_key: str = "text"
    invalid_utf8: str = "error"
    """"error" or "replace"."""


@dataclass(frozen=True)
class Format:
    """How a kind of file is cut into documents, and how they become text."""

    split: Callable[[BinaryIO, str], Iterator[RawDocument]]
    decode: Callable[[RawDocument, Decoding], str]


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that ``inputs`` (files, folders, glob patterns) name, in order, each once.

    Folders give all their files but hidden ones, sorted by path.
    Errors: DataError for an input that names none, or a folder with something else among them.
    """
    found: dict[Path, Path] = {}
    for name in inputs:
        paths = _expand(name)
        if not paths:
            raise DataError(f"--input {name} names no file; give files, folders or glob patterns")
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_blocks(files: Sequence[Path], text_format: str) -> Iterator[Block]:
    """All documents of ``files``, in order, in blocks of about a mebibyte.

    ``text_format``: the key in `FORMATS` for files that aren't JSON lines.
    The blocks depend on the files alone. Errors: DataError for files that can't be read.
    """
    for path in files:
        file_format = FORMATS["jsonl" if _is_json(path) else text_format]
        try:
            with path.open("rb") as stored:
                yield from _blocks(path, stored, file_format)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror or error})") from None
        except (EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{path} is damaged or truncated ({error}); fetch it again") from None


def _blocks(path: Path, stored: BinaryIO, file_format: Format) -> Iterator[Block]:
    documents: list[RawDocument] = []
    size, reported = 0, 0
    stream = _OPENERS.get(path.suffix, lambda file: file)(stored)
    for document in file_format.split(stream, str(path)):
        documents.append(document)
        size += len(document.raw)
        if size >= _BLOCK_BYTES:
            yield Block(documents, file_format.decode, stored.tell() - reported)
            documents, size, reported = [], 0, stored.tell()
    yield Block(documents, file_format.decode, stored.tell() - reported)


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if name and path.is_dir():
        # followlinks is off: a link to a parent would never end.
        tree = (Path(folder, file) for folder, _, files in os.walk(path) for file in files)
        found = sorted(p for p in tree if not _is_hidden(p.relative_to(path)))
        for entry in found:
            if not entry.is_file():
                raise DataError(
                    f"{entry} is a broken link or no file; remove it from --input {name}"
                )
        return found
    if name and path.exists():
        return [path]
    return sorted(Path(match) for match in glob.glob(name, recursive=True) if Path(match).is_file())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_json(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in _OPENERS else path
    return name.suffix in _JSON_SUFFIXES


# --- compression ---------------------------------------------------------------------------------


class _ZstdFile(io.RawIOBase):
    """Decompressed content of a .zst file, frame after frame.

    zstandard's own reader takes a file cut off in the middle of a frame for one that ends there.
    """

    def __init__(self, stored: BinaryIO):
        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._output:
            self._input = self._input or self._stored.read(1 << 17)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


_OPENERS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda stored: io.BufferedReader(gzip.GzipFile(fileobj=stored), 1 << 17),
    ".zst": lambda stored: io.BufferedReader(_ZstdFile(stored), 1 << 17),
}


# --- formats -------------------------------------------------------------------------------------


def _split_lines(stream: BinaryIO, path: str) -> Iterator[RawDocument]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield RawDocument(path, number, line)


def _split_whole(stream: BinaryIO, path: str) -> Iterator[RawDocument]:
    yield RawDocument(path, 1, stream.read())


def _split_at_blank_lines(stream: BinaryIO, path: str) -> Iterator[RawDocument]:
    lines: list[bytes] = []
    first = 1
    for number, line in enumerate(stream, start=1):
        if line.strip():
            if not lines:
                first = number
            lines.append(line)
        elif lines:
            yield RawDocument(path, first, b"".join(lines))
            lines = []
    if lines:
        yield RawDocument(path, first, b"".join(lines))


def _decode_text(document: RawDocument, decoding: Decoding) -> str:
    errors = "strict" if decoding.invalid_utf8 == "error" else "replace"
    try:
        # A byte-order mark is no part of the text.
        return document.raw.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        line = document.line + document.raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{document.path}:{line}: byte 0x{document.raw[error.start]:02x} is not UTF-8; "
            "convert the file, or pass --invalid-utf8 replace"
        ) from None


def _decode_json(document: RawDocument, decoding: Decoding) -> str:
    try:
        record = json.loads(_decode_text(document, decoding))
    except (ValueError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        reason = "nested too deep" if nested else getattr(error, "msg", "a number is too long")
        raise DataError(
            f"{document.place}: not a line of JSON ({reason}); mend or remove it"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{document.place}: a {type(record).__name__} where an object is expected; "
            'each line must look like {"text": …}'
        )
    text = record.get(decoding.json_key)
    if not isinstance(text, str):
        found = ", ".join(record) or "no keys"
        what = "is not a string" if decoding.json_key in record else f"is missing (found: {found})"
        raise DataError(
            f'{document.place}: key "{decoding.json_key}" {what}; choose another --json-key'
        )
    return _without_surrogates(text, document, decoding)


def _without_surrogates(text: str, document: RawDocument, decoding: Decoding) -> str:
    """JSON can spell half a character (``"\\ud83d"``), which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if decoding.invalid_utf8 == "error":
            raise DataError(
                f"{document.place}: text with half a surrogate pair, which is no character; "
                "mend the line, or pass --invalid-utf8 replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


FORMATS: dict[str, Format] = {
    "jsonl": Format(_split_lines, _decode_json),
    "file": Format(_split_whole, _decode_text),
    "blank-line": Format(_split_at_blank_lines, _decode_text),
}
"""By name: JSON lines, one document a file, and documents between blank lines."""
