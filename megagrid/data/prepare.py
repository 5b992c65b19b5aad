"""From text to a token file, in parallel processes.

    read (this process) → blocks of documents → decode, tokenize (workers) → write (this process)

Blocks are cut by the input alone and written in the order they were read, so the output is the same
with any number of workers. At most a few blocks a worker are under way: memory doesn't grow with
the corpus.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megagrid.data.corpus import Block, Decoding, find_files, read_blocks
from megagrid.data.indexed import (
    IndexedWriter,
    dtype_for,
    tokenizer_fingerprint,
    tokenizer_path,
)
from megagrid.data.temporary import temporary_name
from megagrid.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from megagrid.errors import DataError

_BLOCKS_PER_WORKER = 3
_PASSAGE_CHARACTERS = 2000

Progress = Callable[[str, int], None]
"""Told what is being done and how many stored bytes of input were done since the last call."""


@dataclass(frozen=True)
class Request:
    """What to prepare, from what and how."""

    inputs: Sequence[str]
    output: Path
    tokenizer: str | None = None
    """A .model file or "bytes"; None: train one of ``vocab_size`` on the input."""
    vocab_size: int = 32000
    text_format: str = "file"
    """How text is cut into documents: a key of `corpus.FORMATS`."""
    decoding: Decoding = field(default_factory=Decoding)
    append_eod: bool = True
    workers: int = 1
    training_bytes: int = 1 << 26
    """Text that a new tokenizer is trained on, at most; drawn evenly from the whole input."""


class Summary(NamedTuple):
    """What was written."""

    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    dtype: np.dtype


class _Encoded(NamedTuple):
    """A block's documents as tokens."""

    tokens: np.ndarray
    lengths: np.ndarray
    empty_documents: int
    text_bytes: int
    stored_bytes: int


def prepare(request: Request, progress: Progress = lambda what, stored_bytes: None) -> Summary:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.model.

    Errors: DataError for input that can't be read, a tokenizer that doesn't fit, or an output that
    can't be written.
    """
    files = find_files(request.inputs)
    tokenizer = _tokenizer(request, files, progress)
    if request.append_eod and tokenizer.eod_id is None:
        raise DataError(
            f"tokenizer {request.tokenizer} has no end-of-document token (no eos piece of control "
            "type); use another, train one with --train-tokenizer, or pass --no-append-eod"
        )
    try:
        return _write(request, files, tokenizer, progress)
    except OSError as error:  # a full disk, a folder that isn't ours; reading raises DataErrors
        raise DataError(
            f"{request.output} can't be written ({error.strerror or error}); "
            "make room, or choose another --output"
        ) from None


def _write(
    request: Request, files: Sequence[Path], tokenizer: Tokenizer, progress: Progress
) -> Summary:
    dtype = dtype_for(tokenizer.vocab_size)
    eod = tokenizer.eod_id if request.append_eod else None
    maker = tokenizer_fingerprint(tokenizer.model)
    documents = empty = tokens = text_bytes = 0
    with (
        _published_last(tokenizer_path(request.output), tokenizer.model) as model,
        IndexedWriter(request.output, tokenizer.vocab_size, eod, maker) as writer,
    ):
        encode = functools.partial(_encode, str(model), eod, dtype, request.decoding)
        blocks = read_blocks(files, request.text_format)
        for encoded in _map_in_order(encode, blocks, request.workers):
            writer.add_documents(encoded.tokens, encoded.lengths)
            documents += len(encoded.lengths)
            tokens += len(encoded.tokens)
            empty += encoded.empty_documents
            text_bytes += encoded.text_bytes
            progress("tokenizing", encoded.stored_bytes)
    return Summary(documents, empty, tokens, text_bytes, tokenizer.vocab_size, dtype)


@contextmanager
def _published_last(path: Path, content: bytes) -> Iterator[Path]:
    """A file of ``content`` that can be read at once, and is called ``path`` if all goes well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _encode(
    model: str, eod: int | None, dtype: np.dtype, decoding: Decoding, block: Block
) -> _Encoded:
    """Runs in a worker. Documents without text are dropped: an EOD alone teaches nothing."""
    tokenizer = _open_once(model)
    end = [] if eod is None else [eod]
    documents = []
    text_bytes = 0
    for document in block.documents:
        if text := block.decode(document, decoding):
            documents.append(np.asarray(tokenizer.encode(text) + end, dtype=dtype))
            text_bytes += len(text.encode())
    tokens = np.concatenate(documents) if documents else np.zeros(0, dtype)
    lengths = np.asarray([len(document) for document in documents], dtype=np.int64)
    empty = len(block.documents) - len(documents)
    return _Encoded(tokens, lengths, empty, text_bytes, block.stored_bytes)


# A worker serves many blocks and the model takes longer to load than a block to pass to it.
_open_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _map_in_order(
    function: Callable[[Block], _Encoded], blocks: Iterable[Block], workers: int
) -> Iterator[_Encoded]:
    """``function`` of each block, in order, in ``workers`` processes; 1: in this one."""
    if workers <= 1:
        yield from map(function, blocks)
        return
    # Spawned, not forked: a fork copies the locks of whatever threads (progress bar) hold them.
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[_Encoded]] = deque()
    with ProcessPoolExecutor(workers, context, _leave_interrupts_to_the_parent) as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(function, block))
                if len(waiting) >= workers * _BLOCKS_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a tokenizing process was killed, perhaps for want of memory; "
                f"choose fewer than --workers {workers}"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    # Ctrl-C reaches every process of the terminal; one traceback less per worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tokenizer(request: Request, files: Sequence[Path], progress: Progress) -> Tokenizer:
    if request.tokenizer is not None:
        return load_tokenizer(request.tokenizer)
    passages = _sample(
        _passages(request, files, progress), request.training_bytes // _PASSAGE_CHARACTERS
    )
    if not passages:
        raise DataError("the input has no text to train a tokenizer on")
    return train_tokenizer(passages, request.vocab_size)


def _passages(request: Request, files: Sequence[Path], progress: Progress) -> Iterator[str]:
    """The text of the input in pieces that a tokenizer can learn from."""
    for block in read_blocks(files, request.text_format):
        for document in block.documents:
            yield from cut_passages(block.decode(document, request.decoding), _PASSAGE_CHARACTERS)
        progress("reading", block.stored_bytes)


def cut_passages(text: str, size: int) -> Iterator[str]:
    """``text`` in pieces of at most ``size`` characters, whole lines where they fit."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _sample(passages: Iterable[str], count: int) -> list[str]:
    """``count`` of ``passages``, all equally likely, in their order (reservoir sampling)."""
    chooser = random.Random(0)
    kept: list[tuple[int, str]] = []
    for number, passage in enumerate(passages):
        if len(kept) < count:
            kept.append((number, passage))
        elif (place := chooser.randrange(number + 1)) < count:
            kept[place] = (number, passage)
    return [passage for _, passage in sorted(kept)]
