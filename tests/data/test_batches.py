import itertools
import threading

import numpy as np
import pytest

from megagrid.data import IGNORE, Loader, Sampler
from megagrid.data.batches import positions_in
from megagrid.errors import DataError
from tests.data.files import dataset, numbered_documents, write_tokens


class Counting:
    """Sample i is i, i+1, …; counts what is read."""

    seq_length = 3

    def __init__(self, samples=None):
        self.len_or_none = samples
        self.read = []

    def __getitem__(self, sample):
        self.read.append(sample)
        return np.arange(sample, sample + 4)


def ids(steps):
    return [int(i) for step in steps for batch in step for i in batch.sample_ids]


def test_a_batch_has_tokens_and_the_next_tokens_as_labels():
    (batch,) = Loader(Counting(), Sampler(2, 2, 1), 0).step(4)
    assert batch.tokens.tolist() == [[4, 5, 6], [5, 6, 7]]
    assert batch.labels.tolist() == [[5, 6, 7], [6, 7, 8]]
    assert batch.sample_ids.tolist() == [4, 5]
    assert batch.valid_tokens == 6
    for array in (batch.tokens, batch.labels, batch.sample_ids):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_labels_of_masked_ids_are_ignored_and_read_all_the_same():
    sampler = Sampler(4, 2, 1)
    (plain, *_), (masked, *_) = (
        Loader(Counting(), sampler, 0, masked_ids=ids).step(0) for ids in ((), (3, 11))
    )
    assert np.array_equal(masked.tokens, plain.tokens)
    hidden = (plain.labels == 3) | (plain.labels == 11)
    assert hidden.any() and not hidden.all()
    assert np.array_equal(masked.labels, np.where(hidden, IGNORE, plain.labels))
    assert masked.valid_tokens == plain.valid_tokens - hidden.sum()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_read_ahead_steps_are_the_same(prefetch):
    loader = Loader(Counting(13), Sampler(4, 1, 1), 0, prefetch=prefetch)
    assert ids(loader.steps()) == list(range(12))
    assert ids(loader.steps(5)) == list(range(5, 13))


def test_reading_ahead_stops_at_its_depth_and_with_its_reader():
    data = Counting()
    before = threading.active_count()
    steps = Loader(data, Sampler(1, 1, 1), 0, prefetch=2).steps()
    assert ids([next(steps)]) == [0]
    steps.close()
    assert threading.active_count() == before
    assert len(data.read) <= 1 + 2 + 1  # read, waiting, in hand


def test_an_error_of_the_read_ahead_thread_reaches_the_reader():
    class Broken(Counting):
        def __getitem__(self, sample):
            if sample == 2:
                raise DataError("sample 2 is damaged")
            return super().__getitem__(sample)

    steps = Loader(Broken(), Sampler(1, 1, 1), 0, prefetch=2).steps()
    next(steps), next(steps)
    with pytest.raises(DataError, match="sample 2 is damaged"):
        next(steps)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_without_repetition_all_ranks_stop_after_the_same_step(dp):
    loaders = [Loader(Counting(13), Sampler(4, 1, dp), rank) for rank in range(dp)]
    assert [loader.steps_left() for loader in loaders] == [3] * dp
    assert [len(list(loader.steps())) for loader in loaders] == [3] * dp
    with pytest.raises(DataError, match=r"13 samples .* 12 to 15; set data\.repeat=true or .* 3"):
        loaders[-1].step(12)


@pytest.mark.parametrize(("batch", "dp"), [(4, 1), (4, 2), (8, 4), (16, 2)])
def test_a_padded_evaluation_reads_every_sample_once_whatever_the_batch(batch, dp):
    read, valid, steps = [], 0, set()
    for rank in range(dp):
        loader = Loader(Counting(13), Sampler(batch, 1, dp), rank, pad=True)
        batches = [b for step in loader.steps() for b in step]
        steps.add(loader.steps_left())
        read += [i for b in batches for i in b.sample_ids.tolist() if i >= 0]
        valid += sum(b.valid_tokens for b in batches)
        padding = [b for b in batches if b.sample_ids[0] < 0]
        assert all((b.labels == IGNORE).all() and (b.tokens == 0).all() for b in padding)
    assert sorted(read) == list(range(13))
    assert valid == 13 * 3
    assert steps == {-(-13 // batch)}


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_one_epoch_shows_every_id_once_on_any_number_of_ranks(tmp_path, dp):
    tokens = write_tokens(tmp_path / "a", numbered_documents(65))
    data = dataset(tokens, 9)
    loaders = [Loader(data, Sampler(8, 1, dp), rank) for rank in range(dp)]
    batches = [b for loader in loaders for step in loader.steps() for b in step]
    assert sorted(i for b in batches for i in b.sample_ids.tolist()) == list(range(72 // 8 * 8))
    labels = np.concatenate([b.labels.ravel() for b in batches])
    assert np.unique(labels[labels > 0], return_counts=True)[1].max() == 1


def test_a_sample_is_the_same_on_any_grid(tmp_path):
    data = dataset(write_tokens(tmp_path / "a", numbered_documents(65)), 9, repeat=True)
    rows = {}
    for micro, dp in ((1, 1), (2, 2), (1, 4), (4, 2)):
        for rank in range(dp):
            for batch in Loader(data, Sampler(8, micro, dp), rank).step(800):
                for sample, row in zip(batch.sample_ids.tolist(), batch.tokens, strict=True):
                    assert rows.setdefault(sample, row.tolist()) == row.tolist()
    assert sorted(rows) == list(range(800, 808))


class InDocuments(Counting):
    """Of two tokens each, the first of one."""

    def documents(self, sample):
        return (np.arange(4) + 1) // 2


def test_a_batch_has_documents_and_positions_if_they_are_asked_for():
    for masks, resets in itertools.product((False, True), repeat=2):
        how = {"mask_documents": masks, "reset_positions": resets}
        (batch,) = Loader(InDocuments(3), Sampler(4, 4, 1), 0, pad=True, **how).step(0)
        assert (batch.documents is not None, batch.positions is not None) == (masks, resets)
        if masks:
            assert batch.documents.tolist() == [[0, 1, 1]] * 3 + [[0, 0, 0]]
        if resets:
            assert batch.positions.tolist() == [[0, 0, 1]] * 3 + [[0, 1, 2]]


def test_some_places_of_a_batch_keep_their_positions_and_all_documents():
    how = {"mask_documents": True, "reset_positions": True}
    (batch,) = Loader(InDocuments(), Sampler(2, 2, 1), 0, **how).step(0)
    some = batch.at(np.array([2, 0]))
    assert some.tokens.tolist() == batch.tokens[:, [2, 0]].tolist()
    assert some.labels.tolist() == batch.labels[:, [2, 0]].tolist()
    assert some.positions.tolist() == [[1, 0]] * 2
    assert np.array_equal(some.documents, batch.documents)


def test_positions_count_from_the_beginning_of_each_document():
    documents = np.array([[0, 0, 0, 1, 2, 2], [3, 4, 4, 4, 4, 4]])
    assert positions_in(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
