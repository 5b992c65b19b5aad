"""Small token files and models for the tests of the data layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megagrid.data.cache import ArrayCache
from megagrid.data.dataset import DocumentDataset, split_documents
from megagrid.data.indexed import IndexedTokens, IndexedWriter
from megagrid.data.tokenizer import SentencePieceTokenizer, train_tokenizer

EOD = 0


def write_tokens(
    prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000
) -> IndexedTokens:
    """A token file of ``documents``, opened."""
    with IndexedWriter(prefix, vocab_size, EOD) as writer:
        for document in documents:
            writer.add(document)
    return IndexedTokens(prefix)


def numbered_documents(count: int, length: int = 10) -> list[list[int]]:
    """Documents of ``length`` tokens with the EOD, in which no other id comes twice."""
    ids = np.arange(1, count * (length - 1) + 1).reshape(count, length - 1)
    return [[*row.tolist(), EOD] for row in ids]


def dataset(
    tokens: IndexedTokens,
    seq_length: int,
    seed: int = 1,
    repeat: bool = False,
    valid_fraction: float = 0.0,
    split: str = "train",
) -> DocumentDataset:
    """A split of ``tokens``, its cache beside it."""
    train, valid = split_documents(len(tokens), valid_fraction, seed)
    cache = ArrayCache(tokens.prefix.with_name("cache"), required=True)
    return DocumentDataset(tokens, train if split == "train" else valid, seq_length, repeat, cache)


@functools.cache
def small_tokenizer() -> SentencePieceTokenizer:
    """A trained model of 400 pieces."""
    return train_tokenizer([TEXT] * 20, 400)


TEXT = """\
def walk(tree):
    for branch in tree:
        if branch is not None:
            yield from walk(branch)
    return "the number of leaves, </s> and </s>", 1234
"""
