import multiprocessing
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megagrid.data.cache import ArrayCache
from megagrid.data.dataset import DocumentDataset, TooFewTokensError, split_documents
from megagrid.data.indexed import IndexedTokens
from tests.data.files import EOD, dataset, numbered_documents, write_tokens


def test_a_sample_has_seq_length_inputs_and_the_next_token_as_label_across_documents(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(20, length=7))
    data = dataset(tokens, seq_length=16)
    followers = {}
    for document in (tokens.document(i).tolist() for i in range(20)):
        followers |= dict(pairwise(document))
    for sample in (data[i] for i in range(data.len_or_none)):
        assert sample.shape == (17,)
        assert sample.dtype == np.int64
        for token, label in zip(sample[:-1].tolist(), sample[1:].tolist(), strict=True):
            # Inside a document its own next token, after its end the first of some other.
            assert label % 6 == 1 if token == EOD else label == followers[token]


def test_an_epoch_shows_every_token_as_a_label_once_but_the_first_and_the_tail(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(33, length=7))
    data = dataset(tokens, seq_length=16)
    labels = Counter(int(token) for i in range(data.len_or_none) for token in data[i][1:])
    del labels[EOD]
    assert set(labels.values()) == {1}
    assert data.len_or_none == (33 * 7 - 1) // 16
    assert sum(labels.values()) >= 33 * 6 - 16


def test_documents_come_in_another_order_each_epoch(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(50))
    data = dataset(tokens, seq_length=9, repeat=True)
    size = data.samples_per_epoch
    epochs = [np.stack([data[e * size + i] for i in range(size)]) for e in range(3)]
    assert not any(np.array_equal(epochs[a], epochs[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert data.len_or_none is None


def test_samples_are_shuffled_beyond_the_shuffle_of_documents(tmp_path):
    tokens = write_tokens(tmp_path / "a", [list(range(1, 900))])
    firsts = [int(sample[0]) for sample in map(dataset(tokens, 8).__getitem__, range(100))]
    assert sorted(firsts) != firsts
    assert len(set(firsts)) == 100


def test_the_order_depends_on_the_seed_and_on_nothing_else(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(50))
    one, same, other = (dataset(tokens, 9, seed) for seed in (1, 1, 2))
    ids = list(range(one.len_or_none))
    expected = [one[i].tolist() for i in ids]
    # Asked for backwards, by another object: the same samples.
    assert [same[i].tolist() for i in reversed(ids)] == expected[::-1]
    assert [other[i].tolist() for i in ids] != expected


def test_the_order_is_the_same_for_ever(tmp_path):
    """A resumed run continues the order of an older release; change this only with the format."""
    data = dataset(write_tokens(tmp_path / "a", numbered_documents(6, length=4)), 5, repeat=True)
    assert [data[i].tolist() for i in range(5)] == [
        [11, 12, 0, 7, 8, 9],
        [0, 13, 14, 15, 0, 16],
        [1, 2, 3, 0, 10, 11],
        [9, 0, 4, 5, 6, 0],
        [8, 9, 0, 1, 2, 3],
    ]


def test_ids_outside_the_data_are_refused(tmp_path):
    data = dataset(write_tokens(tmp_path / "a", numbered_documents(50)), 9)
    for sample in (-1, data.len_or_none):
        with pytest.raises(IndexError):
            data[sample]


def test_documents_without_tokens_do_no_harm(tmp_path):
    tokens = write_tokens(tmp_path / "a", [[], [1, 2], [], [], [3, 4, 5], []])
    data = dataset(tokens, 4)
    assert sorted(data[0].tolist()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("documents", "fraction"), [(100, 0.1), (7, 0.5), (2, 0.01), (1000, 0.999)]
)
def test_train_and_valid_never_share_a_document_and_leave_none_out(seed, documents, fraction):
    train, valid = split_documents(documents, fraction, seed)
    ids = [
        set(split.document_ids(documents, np.arange(split.documents)).tolist())
        for split in (train, valid)
    ]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == set(range(documents))
    assert len(ids[1]) == min(max(round(fraction * documents), 1), documents - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_samples_of_train_and_valid_share_no_token_of_a_document(tmp_path, seed):
    tokens = write_tokens(tmp_path / "a", numbered_documents(60))
    seen = []
    for split in ("train", "valid"):
        data = dataset(tokens, 9, seed, valid_fraction=0.2, split=split)
        seen.append({int(t) for i in range(data.len_or_none) for t in data[i]} - {EOD})
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]


def test_the_held_out_documents_depend_on_the_seed():
    held_out = {
        tuple(split_documents(100, 0.05, seed)[1].document_ids(100, np.arange(5)).tolist())
        for seed in range(10)
    }
    assert len(held_out) == 10


def test_a_split_that_does_not_fill_a_sample_is_refused_with_numbers(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(4))
    message = r"a has 40 tokens in 4 train documents and .*train\.seq_length=40 needs 41; .*valid"
    with pytest.raises(TooFewTokensError, match=message):
        dataset(tokens, 40)
    assert dataset(tokens, 39).len_or_none == 1


def test_an_overwritten_corpus_is_read_anew_in_spite_of_the_cache(tmp_path):
    prefix = tmp_path / "a"
    old = dataset(write_tokens(prefix, numbered_documents(20)), 9)
    old_tokens = [old[i].tolist() for i in range(old.len_or_none)]
    lengths = [14] + [10] * 18 + [6]  # as many tokens, other documents
    write_tokens(prefix, [[500 + i] * length for i, length in enumerate(lengths)])
    new = dataset(IndexedTokens(prefix), 9)
    seen = {int(t) for i in range(new.len_or_none) for t in new[i]}
    assert seen <= set(range(500, 520))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    # Whoever had the old file open still reads the old file.
    assert [old[i].tolist() for i in range(old.len_or_none)] == old_tokens


def test_the_cache_is_used_and_a_damaged_one_is_made_again(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(20))
    expected = dataset(tokens, 9)[3].tolist()
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    made = path.stat().st_mtime_ns
    assert dataset(tokens, 9)[3].tolist() == expected
    assert path.stat().st_mtime_ns == made
    for damaged in (content[:-10], content[:20], b"", b"rubbish"):
        path.write_bytes(damaged)
        assert dataset(tokens, 9)[3].tolist() == expected
        assert path.read_bytes() == content


def test_counts_are_those_of_the_split(tmp_path):
    tokens = write_tokens(tmp_path / "a", [[1, 1, 2], [1, 1, 2], [1, 1, 2], [1, 1, 2]])
    data = dataset(tokens, 3, valid_fraction=0.25)
    assert data.token_counts(5).tolist() == [0, 6, 3, 0, 0]


ROUNDS = 10


def _cold_starts(prefix, barrier, results):
    tokens = IndexedTokens(prefix)
    read = []
    for number in range(ROUNDS):
        barrier.wait(60)
        cache = ArrayCache(prefix.with_name(f"cache{number}"), required=True)
        train, _ = split_documents(len(tokens), 0, number)
        data = DocumentDataset(tokens, train, 9, True, cache)
        read.append([data[i].tolist() for i in range(0, 100, 7)])
    results.put(read)


def test_four_cold_jobs_at_once_on_one_cache_all_read_the_same(tmp_path):
    tokens = write_tokens(tmp_path / "a", numbered_documents(20))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    jobs = [
        context.Process(target=_cold_starts, args=(tokens.prefix, barrier, results))
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    read = [results.get(timeout=120) for _ in jobs]
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 4
    assert all(samples == read[0] for samples in read)
    assert len(read[0]) == ROUNDS
    for folder in tmp_path.glob("cache*"):
        assert all(file.suffix == ".npy" for file in folder.iterdir())


def test_documents_of_a_sample_are_told_apart_at_their_ends(tmp_path):
    tokens = write_tokens(tmp_path / "a", [*numbered_documents(20, length=7), [EOD]])
    data = dataset(tokens, seq_length=16)
    for sample in range(data.len_or_none):
        ids, numbers = data[sample], data.documents(sample)
        assert numbers.shape == (17,) and numbers.dtype == np.int64 and numbers[0] == 0
        # The token that ends a document is its last; nothing else is followed by another's.
        assert numbers[1:].tolist() == (numbers[:-1] + (ids[:-1] == EOD)).tolist()


def test_a_document_without_end_is_told_apart_too(tmp_path):
    tokens = write_tokens(tmp_path / "a", [[5] * 6] * 4)
    data = dataset(tokens, seq_length=12)
    assert data.documents(0).tolist() == [0] * 6 + [1] * 6 + [2]
