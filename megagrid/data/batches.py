"""Microbatches of a rank, step by step, read ahead by a background thread.

A `Batch` holds `tokens` and `labels`, both int64 [b, s], where ``labels[:, t]`` is the token after
``tokens[:, t]``, and `sample_ids`, int64 [b]. A label of `IGNORE` counts neither in the loss nor in
the number of valid tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from megagrid.data.dataset import SampleSource
from megagrid.data.sampler import Sampler
from megagrid.errors import DataError

IGNORE = -100
NO_SAMPLE = -1


@dataclass(frozen=True)
class Batch:
    """One microbatch: tokens [b, s], labels [b, s], sample_ids [b], all int64.

    ``documents``: int64 [b, whole sample], the number of each token's document, if tokens see no
    other. ``positions``: int64 [b, s], in its document, if they aren't those in the sample.
    """

    tokens: np.ndarray
    labels: np.ndarray
    sample_ids: np.ndarray
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None

    @property
    def valid_tokens(self) -> int:
        """Labels that count."""
        return int(np.count_nonzero(self.labels != IGNORE))

    def at(self, places: np.ndarray) -> Batch:
        """Of each sample the tokens at ``places`` (int64 [n]) alone, with their labels."""
        names = ("tokens", "labels") + (("positions",) if self.positions is not None else ())
        return replace(self, **{n: np.take(getattr(self, n), places, axis=1) for n in names})


class Loader:
    """The batches of one data-parallel rank; ranks that differ in tp, cp or pp only load the same.

    ``masked_ids``: labels of these ids are ignored.
    ``pad``: rows past the end of the data are filled with ignored labels and sample id −1, so that
    an evaluation reads every sample once, whatever the batch size. Without it, a step that the data
    can't fill is a DataError.

    ``mask_documents``, ``reset_positions``: batches have documents, positions.
    """

    def __init__(
        self,
        dataset: SampleSource,
        sampler: Sampler,
        dp_rank: int,
        *,
        prefetch: int = 0,
        pad: bool = False,
        mask_documents: bool = False,
        reset_positions: bool = False,
        masked_ids: Sequence[int] = (),
    ):
        self.dataset = dataset
        self.sampler = sampler
        self.dp_rank = dp_rank
        self.prefetch = prefetch
        self.pad = pad
        self.mask_documents = mask_documents
        self.reset_positions = reset_positions
        self.masked_ids = np.asarray(masked_ids, dtype=np.int64)

    def steps_left(self, consumed_samples: int = 0) -> int | None:
        """Steps that the data still gives, the same on all ranks; None: without end."""
        full = self.sampler.full_steps(self.dataset.len_or_none, consumed_samples)
        if full is None or not self.pad:
            return full
        left = max(self.dataset.len_or_none - consumed_samples, 0)
        return -(-left // self.sampler.global_batch_size)

    def step(self, consumed_samples: int) -> list[Batch]:
        """The microbatches of the step after ``consumed_samples``.

        Errors: DataError where the data ends before the step is full and ``pad`` is off.
        """
        end = self.dataset.len_or_none
        asked = consumed_samples + self.sampler.global_batch_size
        if end is not None and asked > end and not self.pad:
            raise DataError(
                f"the data has {end} samples and the step needs samples {consumed_samples} to "
                f"{asked - 1}; set data.repeat=true or train.steps to at most "
                f"{end // self.sampler.global_batch_size}"
            )
        ids = self.sampler.sample_ids(consumed_samples, self.dp_rank)
        return [self._batch(row, end) for row in ids]

    def steps(self, consumed_samples: int = 0) -> Iterator[list[Batch]]:
        """The steps from ``consumed_samples`` on, until the data has no more.

        Up to ``prefetch`` of them are read ahead in a thread, which ends with the iterator.
        """
        made = self._make_steps(consumed_samples)
        return _read_ahead(made, self.prefetch) if self.prefetch else made

    def _make_steps(self, consumed_samples: int) -> Iterator[list[Batch]]:
        left = self.steps_left(consumed_samples)
        while left is None or left > 0:
            yield self.step(consumed_samples)
            consumed_samples += self.sampler.global_batch_size
            left = None if left is None else left - 1

    def _batch(self, ids: np.ndarray, end: int | None) -> Batch:
        length = self.dataset.seq_length
        rows = np.zeros((len(ids), length + 1), dtype=np.int64)
        real = np.ones(len(ids), dtype=bool) if end is None else ids < end
        for row in np.flatnonzero(real):
            rows[row] = self.dataset[int(ids[row])]
        # Copies: torch.from_numpy wants memory of its own, writable and contiguous.
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        labels[~real] = IGNORE
        labels[np.isin(labels, self.masked_ids)] = IGNORE
        documents = np.zeros((len(ids), length), dtype=np.int64)
        if self.mask_documents or self.reset_positions:
            for row in np.flatnonzero(real):
                documents[row] = self.dataset.documents(int(ids[row]))[:-1]
        return Batch(
            tokens,
            labels,
            np.where(real, ids, NO_SAMPLE),
            documents if self.mask_documents else None,
            positions_in(documents) if self.reset_positions else None,
        )


def positions_in(documents: np.ndarray) -> np.ndarray:
    """Each token's position in its document, from 0, from their numbers; both int64 [b, s].

    A sample that begins within a document counts from its own first token.
    """
    places = np.arange(documents.shape[1])
    begins = np.diff(documents, axis=1, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def _read_ahead(steps: Iterator[list[Batch]], depth: int) -> Iterator[list[Batch]]:
    """``steps``, made in a thread, at most ``depth`` of them waiting; errors are raised here."""
    waiting: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()
    finished = object()

    def put(item: object) -> None:
        while not stop.is_set():
            try:
                return waiting.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with closing(steps):
                for step in steps:
                    put(step)
                    if stop.is_set():
                        return
            put(finished)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not finished:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
