"""Token files: a corpus as one array on disk, and an index that says where its documents lie.

    PREFIX.bin   the tokens of all documents, one after the other, little-endian, nothing else
    PREFIX.idx   the header below, then int64 [documents + 1]: where document i starts, in tokens,
                 then the CRC-32 of those

The element type is the smallest unsigned one that holds the vocabulary. Offsets are int64, so a
file may be larger than memory and larger than 4 GiB. Lengths count the EOD that ends a document.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megagrid.data.temporary import temporary_name
from megagrid.errors import DataError

REMEDY = "write it again with `megagrid data prepare`"
UNKNOWN_TOKENIZER = bytes(32)

_MAGIC = b"megagrid"
_VERSION = 1
# magic, version, bytes per token, documents, tokens, vocab size, EOD id, largest id,
# fingerprint of the tokenizer, digest of the tokens, digest of their ends
_HEADER = struct.Struct("<8sIIqqqqq32s32s8s")
_CHECK = struct.Struct("<I")  # CRC-32, of the header and of the offsets
_OFFSETS_AT = _HEADER.size + _CHECK.size
_NONE = -1
_EDGE = 1 << 16


def bin_path(prefix: str | Path) -> Path:
    """Where the tokens lie."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Where the index lies."""
    return Path(f"{prefix}.idx")


def tokenizer_path(prefix: str | Path) -> Path:
    """Where a copy of the tokenizer lies that made the tokens."""
    return Path(f"{prefix}.tokenizer.model")


def tokenizer_fingerprint(model: bytes) -> bytes:
    """32 bytes that tell tokenizers apart by their model files."""
    return hashlib.blake2b(model, digest_size=32).digest()


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest of uint16, uint32, uint64 that holds every id below ``vocab_size``."""
    for name in ("<u2", "<u4"):
        if vocab_size <= np.iinfo(name).max + 1:
            return np.dtype(name)
    return np.dtype("<u8")


@dataclass(frozen=True)
class Header:
    """What an index says about its tokens."""

    dtype: np.dtype
    documents: int
    tokens: int
    vocab_size: int
    eod_id: int | None
    max_id: int
    tokenizer: bytes
    """`tokenizer_fingerprint` of the model that made the tokens; zeros: unknown."""
    content: bytes
    """Digest of the tokens, 32 bytes."""
    edges: bytes
    """Digest of the first and last 64 KiB, 8 bytes: cheap enough to check at every opening."""

    def pack(self) -> bytes:
        eod = _NONE if self.eod_id is None else self.eod_id
        packed = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.dtype.itemsize,
            self.documents,
            self.tokens,
            self.vocab_size,
            eod,
            self.max_id,
            self.tokenizer,
            self.content,
            self.edges,
        )
        return packed + _CHECK.pack(zlib.crc32(packed))

    @classmethod
    def unpack(cls, raw: bytes, path: Path) -> Header:
        """Errors: DataError if ``raw``, the start of ``path``, is no header of this version."""
        if len(raw) < _OFFSETS_AT or not raw.startswith(_MAGIC):
            raise DataError(f"{path} is not an index of tokens; {REMEDY}")
        fields = _HEADER.unpack_from(raw)
        version, itemsize = fields[1:3]
        if version != _VERSION:
            raise DataError(
                f"{path} has format version {version} and this program reads {_VERSION}; {REMEDY}"
            )
        if _CHECK.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]):
            raise DataError(f"{path} is damaged: its header fails its checksum; {REMEDY}")
        documents, tokens, vocab_size, eod, max_id, *digests = fields[3:]
        eod_id = None if eod == _NONE else eod
        dtype = np.dtype(f"<u{itemsize}")
        return cls(dtype, documents, tokens, vocab_size, eod_id, max_id, *digests)


class IndexedTokens:
    """A token file, opened for reading: mapped, not loaded.

    Errors: DataError if a file is missing, truncated, damaged, or belongs to another one.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        raw = _map(idx_path(prefix), prefix)
        self.header = Header.unpack(raw[:_OFFSETS_AT], idx_path(prefix))
        count = self.header.documents + 1
        self._check_size(len(raw), _OFFSETS_AT + 8 * count + _CHECK.size, idx_path(prefix))
        self.offsets = np.frombuffer(raw, dtype="<i8", count=count, offset=_OFFSETS_AT)
        """int64 [documents + 1], in tokens."""
        (check,) = _CHECK.unpack_from(raw, _OFFSETS_AT + 8 * count)
        if zlib.crc32(self.offsets.data) != check:
            raise DataError(
                f"{idx_path(prefix)} is damaged: its offsets fail their checksum; {REMEDY}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != self.header.tokens:
            raise DataError(f"{idx_path(prefix)} is damaged: its offsets don't add up; {REMEDY}")
        tokens = _map(bin_path(prefix), prefix)
        self._check_size(
            len(tokens), self.header.tokens * self.header.dtype.itemsize, bin_path(prefix)
        )
        if edges_digest(tokens) != self.header.edges:
            raise DataError(
                f"{bin_path(prefix)} is not what {idx_path(prefix)} describes; {REMEDY}"
            )
        self.tokens = np.frombuffer(tokens, dtype=self.header.dtype)
        """[tokens] of the file's own type."""

    def __len__(self) -> int:
        return self.header.documents

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, with its EOD; a view of the file."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, EOD included; int64 [documents]."""
        return np.diff(self.offsets)

    def verify(self) -> None:
        """Reads every token. Errors: DataError if one of them has changed since it was written."""
        if _digest(self.tokens.data) != self.header.content:
            raise DataError(f"{bin_path(self.prefix)} is damaged: its digest differs; {REMEDY}")

    def tokenizer(self) -> Path | None:
        """The model file beside the tokens; None if somebody took it away.

        Errors: DataError if it is another one than made them.
        """
        path = tokenizer_path(self.prefix)
        try:
            model = path.read_bytes()
        except OSError:
            return None
        if self.header.tokenizer not in (UNKNOWN_TOKENIZER, tokenizer_fingerprint(model)):
            raise DataError(
                f"{path} is not the tokenizer that {bin_path(self.prefix)} was made with; {REMEDY}"
            )
        return path

    @staticmethod
    def _check_size(found: int, expected: int, path: Path) -> None:
        if found != expected:
            what = "truncated" if found < expected else "too long"
            raise DataError(f"{path} is {what}: {found} bytes instead of {expected}; {REMEDY}")


class IndexedWriter:
    """Writes a token file, document after document; a context manager.

    Both files appear under their names when the block ends well, and not at all when it raises.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int,
        eod_id: int | None,
        tokenizer: bytes = UNKNOWN_TOKENIZER,
        dtype: str | np.dtype | None = None,
    ):
        """``dtype``: of the file; None: the smallest that holds the vocabulary.

        Errors: DataError if ``dtype`` doesn't hold the vocabulary.
        """
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype or dtype_for(vocab_size)).newbyteorder("<")
        if self.dtype.kind != "u" or vocab_size > np.iinfo(self.dtype).max + 1:
            raise DataError(
                f"{self.dtype.name} can't hold the ids of a vocabulary of {vocab_size}; "
                f"write {bin_path(prefix)} as {dtype_for(vocab_size).name}"
            )
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._tokenizer = tokenizer
        self._lengths: list[np.ndarray] = []
        self._max_id = _NONE
        self._digest = hashlib.blake2b(digest_size=32)

    def __enter__(self) -> IndexedWriter:
        self._temporary = [
            temporary_name(bin_path(self.prefix)),
            temporary_name(idx_path(self.prefix)),
        ]
        try:
            self._file = self._temporary[0].open("wb")
        except OSError as error:
            raise DataError(
                f"{bin_path(self.prefix)} can't be written ({error.strerror}); "
                "choose another --output"
            ) from None
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                self._publish()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document, its EOD included."""
        self.add_documents(np.asarray(tokens), np.asarray([len(tokens)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends documents that lie one after the other in ``tokens`` [sum of ``lengths``].

        Errors: DataError if an id is outside the vocabulary: a cast would make another token of it.
        """
        if tokens.size:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self._vocab_size:
                raise DataError(
                    f"token id {low if low < 0 else high} is outside the vocabulary of "
                    f"{self._vocab_size} that {bin_path(self.prefix)} is written for"
                )
            self._max_id = max(self._max_id, high)
        raw = tokens.astype(self.dtype, copy=False).tobytes()
        self._digest.update(raw)
        self._file.write(raw)
        self._lengths.append(np.asarray(lengths, dtype=np.int64))

    def _publish(self) -> None:
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        if not lengths.sum():
            raise DataError(f"nothing to write to {bin_path(self.prefix)}: the input has no tokens")
        binary, index = self._temporary
        with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            edges = edges_digest(raw)
        header = Header(
            self.dtype,
            len(lengths),
            int(lengths.sum()),
            self._vocab_size,
            self._eod_id,
            self._max_id,
            self._tokenizer,
            self._digest.digest(),
            edges,
        )
        write_index(index, header, lengths)
        # Without its index a token file doesn't exist: it goes first and comes back last, so that a
        # crash in between leaves "missing", never the old index beside new tokens.
        idx_path(self.prefix).unlink(missing_ok=True)
        binary.replace(bin_path(self.prefix))
        index.replace(idx_path(self.prefix))


def write_index(path: Path, header: Header, lengths: np.ndarray) -> None:
    """Writes the index of documents of ``lengths`` tokens (int64 [documents]) to ``path``."""
    offsets = np.zeros(len(lengths) + 1, dtype="<i8")
    np.cumsum(lengths, out=offsets[1:])
    with path.open("wb") as file:
        file.write(header.pack())
        file.write(offsets.data)
        file.write(_CHECK.pack(zlib.crc32(offsets.data)))


def _map(path: Path, prefix: str | Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        stem = Path(prefix).with_suffix("")
        if Path(prefix).suffix in (".bin", ".idx") and idx_path(stem).exists():
            raise DataError(
                f'{path} doesn\'t exist; the prefix of these files is "{stem}"'
            ) from None
        raise DataError(
            f"{path} doesn't exist; write it with `megagrid data prepare --output {prefix}`, "
            "or name another prefix"
        ) from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror})") from None
    except ValueError:  # mmap's answer to an empty file
        raise DataError(f"{path} is truncated: it is empty; {REMEDY}") from None


def edges_digest(raw: mmap.mmap) -> bytes:
    """`Header.edges` of a mapped token file."""
    return hashlib.blake2b(raw[:_EDGE] + raw[-_EDGE:], digest_size=8).digest()


def _digest(raw: memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    raw = raw.cast("B")
    for start in range(0, len(raw), 1 << 24):
        digest.update(raw[start : start + (1 << 24)])
    return digest.digest()
