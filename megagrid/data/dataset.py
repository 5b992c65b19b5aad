"""Samples of a fixed length, cut from the shuffled documents of a token file.

    documents of the split   A A A e │ B B e │ C C C C C e            e: end of document
    shuffled for an epoch    C C C C C e │ A A A e │ B B e
    samples of 4 tokens      C C C C C                                 inputs CCCC, labels CCCC
                                     C e A A A                         inputs CeAA, labels eAAA
                                             A e B B e                 inputs AeBB, labels eBBe
    shuffled for an epoch    2 0 1

Neighbouring samples share one token, the last label of one and the first input of the next: every
token is a label exactly once an epoch, but the first of the epoch and the tail that fills no
sample. All of it is a function of (seed, documents, sequence length); the grid has no part in it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megagrid.data.cache import ArrayCache
from megagrid.data.hashing import Permutation
from megagrid.data.indexed import REMEDY, IndexedTokens, idx_path
from megagrid.errors import DataError


class SampleSource(Protocol):
    """What a loader reads from: numbered samples, the same for everyone who asks."""

    seq_length: int

    @property
    def len_or_none(self) -> int | None:
        """How many samples there are; None: without end."""

    def __getitem__(self, sample: int) -> np.ndarray:
        """Tokens of one sample, int64 [seq_length + 1]; labels are all but the first.

        Errors: IndexError outside 0 … len_or_none − 1.
        """

    def documents(self, sample: int) -> np.ndarray:
        """Which of the sample's documents each of its tokens is of, from 0; int64
        [seq_length + 1]. The token that ends a document is of it."""

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id comes, or came in a part large enough to tell; float64 [vocab_size]."""


class TooFewTokensError(DataError):
    """A split that doesn't fill one sample."""


@dataclass(frozen=True)
class Split:
    """The documents ``first`` … ``first + documents − 1`` of a seeded shuffle of all of them."""

    name: str
    first: int
    documents: int
    seed: int

    def document_ids(self, total: int, places: np.ndarray) -> np.ndarray:
        """Which documents of the file lie at ``places`` (int64 [n]) of the split; int64 [n]."""
        return Permutation(total, "split", self.seed).of(places + self.first)


def split_documents(documents: int, valid_fraction: float, seed: int) -> tuple[Split, Split]:
    """Training and validation splits: two ends of one shuffle, so no seed makes them meet.

    A fraction above 0 holds out one document at least, of two or more, and leaves one at least.
    """
    held_out = round(documents * valid_fraction)
    if valid_fraction > 0:
        held_out = min(max(held_out, 1), documents - 1)
    return (
        Split("train", held_out, documents - held_out, seed),
        Split("valid", 0, held_out, seed),
    )


class DocumentDataset:
    """The samples of one split of one token file.

    An epoch takes two int64 arrays as long as the split has documents, which `ArrayCache` keeps on
    disk; the order of samples takes no memory at all. ``repeat``: sample ids go on through further
    epochs, each shuffled anew.

    Errors: TooFewTokensError if the split doesn't fill one sample.
    """

    # One being read, and the one before, which samples read ahead may still straddle.
    _EPOCHS_OPEN = 2
    # Enough to know the frequencies of a vocabulary, and read in seconds.
    _TOKENS_COUNTED = 1 << 26

    def __init__(
        self,
        tokens: IndexedTokens,
        split: Split,
        seq_length: int,
        repeat: bool,
        cache: ArrayCache,
    ):
        self.tokens = tokens
        self.split = split
        self.seq_length = seq_length
        self._repeat = repeat
        self._cache = cache
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        total = int(self._epoch(0).starts[-1])
        # The last label needs a token of its own, the other samples find theirs in their successor.
        self.samples_per_epoch = (total - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise TooFewTokensError(
                f"{tokens.prefix} has {total} tokens in {split.documents} {split.name} documents "
                f"and one sample of train.seq_length={seq_length} needs {seq_length + 1}; "
                "shorten it, add documents or change data.valid_fraction"
            )

    @property
    def len_or_none(self) -> int | None:
        return None if self._repeat else self.samples_per_epoch

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.concatenate(list(self._pieces(sample))).astype(np.int64)

    def documents(self, sample: int) -> np.ndarray:
        lengths = [len(piece) for piece in self._pieces(sample)]
        return np.repeat(np.arange(len(lengths)), lengths)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        counts = np.zeros(vocab_size)
        counted = 0
        for document in self._epoch(0).documents:
            tokens = self.tokens.document(document)
            counts += np.bincount(tokens, minlength=vocab_size)
            counted += len(tokens)
            if counted >= self._TOKENS_COUNTED:
                break
        return counts

    def _pieces(self, sample: int) -> Iterator[np.ndarray]:
        """The tokens of one sample, those of each document by themselves; views of the file."""
        if sample < 0 or (not self._repeat and sample >= self.samples_per_epoch):
            raise IndexError(f"sample {sample} of {self.samples_per_epoch}")
        number, place = divmod(sample, self.samples_per_epoch)
        order = Permutation(self.samples_per_epoch, "samples", self.split.seed, number)
        epoch, start = self._epoch(number), order(place) * self.seq_length
        left = self.seq_length + 1
        place = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        skip = start - int(epoch.starts[place])
        while left:
            piece = self.tokens.document(epoch.documents[place])[skip : skip + left]
            if len(piece):
                yield piece
            left -= len(piece)
            place, skip = place + 1, 0

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None:
            epoch = _Epoch(*self._cache.get(self._cache_name(number), self._epoch_maker(number)))
            self._epochs[number] = epoch
            while len(self._epochs) > self._EPOCHS_OPEN:
                self._epochs.popitem(last=False)
        return epoch

    def _epoch_maker(self, number: int) -> Callable[[], np.ndarray]:
        def make() -> np.ndarray:
            lengths = self.tokens.lengths
            if lengths.min() < 0:
                raise DataError(
                    f"{idx_path(self.tokens.prefix)} is damaged: a document has a negative length; "
                    f"{REMEDY}"
                )
            count = self.split.documents
            order = Permutation(count, "documents", self.split.name, self.split.seed, number)
            ids = self.split.document_ids(len(self.tokens), order.of(np.arange(count)))
            out = np.zeros((2, count + 1), dtype=np.int64)
            np.cumsum(lengths[ids], out=out[0, 1:])
            out[1, :-1] = ids
            return out

        return make

    def _cache_name(self, number: int) -> str:
        """All that an epoch's order depends on: a changed corpus never meets an old index."""
        key = hashlib.blake2b(digest_size=16)
        key.update(self.tokens.header.pack())
        key.update(repr(("order 1", self.split, number)).encode())
        return f"{self.tokens.prefix.name}-{self.split.name}-epoch{number}-{key.hexdigest()}"


class _Epoch:
    """One order of a split's documents, a row each of an int64 [2, documents + 1] array.

    ``starts``: where each document begins in the stream, and at last the stream's length.
    ``documents``: which documents they are.
    """

    def __init__(self, starts: np.ndarray, documents: np.ndarray):
        # Plain views: indexing a numpy.memmap costs microseconds for each scalar.
        self.starts = np.asarray(starts)
        self.documents = np.asarray(documents)[:-1]
