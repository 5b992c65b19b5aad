"""The data of a run: what it trains on and what it is judged by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrid.data.blend import BlendedDataset, check_weights
from megagrid.data.cache import ArrayCache
from megagrid.data.dataset import (
    DocumentDataset,
    SampleSource,
    TooFewTokensError,
    split_documents,
)
from megagrid.data.entropy import cross_entropy
from megagrid.data.indexed import IndexedTokens, bin_path
from megagrid.data.synthetic import SyntheticDataset
from megagrid.errors import DataError

SYNTHETIC = "synthetic"
SYNTHETIC_VALID_SAMPLES = 64


@dataclass(frozen=True)
class DataSplits:
    """Training samples, held-out samples (None: nothing is held out), and where they come from."""

    train: SampleSource
    valid: SampleSource | None
    vocab_size: int
    """Of the model."""
    fingerprint: str
    """Changes whenever a file's content does."""
    tokenizer: Path | None = None
    """The model file that made the tokens; None for synthetic ones, or if it is gone."""
    eod_id: int | None = None
    """The id that ends each document, if the files have one."""

    def unigram_entropy(self) -> float | None:
        """Loss on held-out samples of a model that knows only how frequent each training token is.

        In nats a token; None where nothing is held out.
        """
        if self.valid is None:
            return None
        held_out = self.valid.token_counts(self.vocab_size)
        return cross_entropy(held_out, self.train.token_counts(self.vocab_size))


def build(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    seq_length: int,
    seed: int,
    valid_fraction: float,
    repeat: bool,
    cache_dir: str | None,
    vocab_size: int,
) -> DataSplits:
    """Opens what ``[data]`` names; every rank does so on its own, and none waits for another.

    ``paths``: prefixes of token files, or "synthetic" (without end), or "synthetic:N" (N samples).
    ``weights`` mix the training samples; validation reads each held-out sample of all of them once.
    ``vocab_size``: of the model; data with an id beyond it is refused here, before the first step.

    Errors: DataError for missing, damaged, mismatched or too small data.
    """
    if any(_is_synthetic(path) for path in paths):
        return _synthetic(paths, seq_length, seed, valid_fraction, repeat, vocab_size)
    check_weights(weights, paths)
    files = [IndexedTokens(path) for path in paths]
    _check_vocabulary(files, vocab_size)
    drawn = [i for i in range(len(files)) if weights is None or weights[i] > 0]
    train, valid = [], []
    too_few: TooFewTokensError | None = None
    for tokens in (files[i] for i in drawn):
        cache = _cache(tokens, cache_dir)
        learnt, held_out = split_documents(len(tokens), valid_fraction, seed)
        train.append(DocumentDataset(tokens, learnt, seq_length, repeat, cache))
        try:
            valid.append(DocumentDataset(tokens, held_out, seq_length, False, cache))
        except TooFewTokensError as error:
            too_few = error
    # Of a blend, the smallest files may hold out less than a sample; something must be held out.
    if valid_fraction > 0 and not valid:
        raise too_few
    return DataSplits(
        _mix(train, weights and [weights[i] for i in drawn]),
        _mix(valid, None) if valid else None,
        vocab_size,
        hashlib.blake2b(b"".join(t.header.pack() for t in files), digest_size=16).hexdigest(),
        files[0].tokenizer(),
        files[0].header.eod_id,
    )


def _mix(datasets: Sequence[DocumentDataset], weights: Sequence[float] | None) -> SampleSource:
    return datasets[0] if len(datasets) == 1 else BlendedDataset(datasets, weights)


def _cache(tokens: IndexedTokens, cache_dir: str | None) -> ArrayCache:
    if cache_dir:
        return ArrayCache(Path(cache_dir), required=True)
    return ArrayCache(tokens.prefix.with_name(f"{tokens.prefix.name}.cache"), required=False)


def _check_vocabulary(files: Sequence[IndexedTokens], vocab_size: int) -> None:
    for tokens in files:
        if tokens.header.max_id >= vocab_size:
            raise DataError(
                f"{bin_path(tokens.prefix)} contains token id {tokens.header.max_id} and "
                f"model.vocab_size={vocab_size} ends before it; "
                f"set model.vocab_size={tokens.header.vocab_size}, the tokenizer's"
            )
        if tokens.header.tokenizer != files[0].header.tokenizer:
            raise DataError(
                f"{tokens.prefix} and {files[0].prefix} come from different tokenizers; "
                "prepare both with the same --tokenizer"
            )


def _is_synthetic(path: str) -> bool:
    return path.partition(":")[0] == SYNTHETIC


def _synthetic(
    paths: Sequence[str],
    seq_length: int,
    seed: int,
    valid_fraction: float,
    repeat: bool,
    vocab_size: int,
) -> DataSplits:
    _, _, count = paths[0].partition(":")
    samples = int(count) if count.isdecimal() else None
    if len(paths) > 1 or (count and not samples):
        raise DataError(
            f'data.paths={list(paths)}: synthetic data is one path alone, "{SYNTHETIC}" or '
            f'"{SYNTHETIC}:N" for N samples'
        )
    train = SyntheticDataset(vocab_size, seq_length, seed, "train", samples, repeat)
    valid = SyntheticDataset(
        vocab_size, seq_length, seed, "valid", SYNTHETIC_VALID_SAMPLES, repeat=False
    )
    return DataSplits(train, valid if valid_fraction > 0 else None, vocab_size, paths[0])
