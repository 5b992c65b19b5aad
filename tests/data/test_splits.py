import math
import os
import stat

import numpy as np
import pytest

from megagrid.data import build
from megagrid.data.indexed import IndexedWriter, tokenizer_path
from megagrid.errors import DataError
from tests.data.files import EOD, numbered_documents, write_tokens


def open_data(*paths, **changes):
    arguments = {
        "weights": None,
        "seq_length": 9,
        "seed": 1,
        "valid_fraction": 0.1,
        "repeat": True,
        "cache_dir": None,
        "vocab_size": 1000,
    }
    return build([str(path) for path in paths], **(arguments | changes))


def test_one_prefix_gives_train_and_held_out_samples(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    data = open_data(tmp_path / "a")
    assert data.train.len_or_none is None
    assert data.valid.len_or_none == (5 * 10 - 1) // 9
    assert data.eod_id == EOD
    assert data.tokenizer is None


def test_nothing_is_held_out_when_nothing_is_asked_for(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    data = open_data(tmp_path / "a", valid_fraction=0.0)
    assert data.valid is None
    assert data.unigram_entropy() is None


def test_several_prefixes_are_mixed_by_weight(tmp_path):
    for name, offset in (("a", 0), ("b", 500)):
        documents = np.array(numbered_documents(50)) + offset
        write_tokens(tmp_path / name, documents.tolist())
    data = open_data(tmp_path / "a", tmp_path / "b", weights=[3, 1])
    from_b = sum(int(data.train[i].min()) >= 500 for i in range(1000))
    assert abs(from_b - 250) <= 1


def test_a_weight_of_zero_leaves_a_prefix_out(tmp_path):
    for name, offset in (("a", 0), ("b", 500)):
        documents = np.array(numbered_documents(50)) + offset
        write_tokens(tmp_path / name, documents.tolist())
    data = open_data(tmp_path / "a", tmp_path / "b", weights=[0, 1])
    assert all(int(data.train[i].min()) >= 500 for i in range(100))


def test_a_blend_of_300_tiny_prefixes_opens_and_draws_all(tmp_path):
    for i in range(300):
        write_tokens(tmp_path / str(i), [[i + 1] * 10])
    paths = [tmp_path / str(i) for i in range(300)]
    data = open_data(*paths, valid_fraction=0.0)
    assert {int(data.train[i][0]) for i in range(300)} == set(range(1, 301))


def test_an_id_beyond_the_model_s_vocabulary_is_refused_naming_both(tmp_path):
    write_tokens(tmp_path / "a", [[1, 2, 64, 3] * 20], vocab_size=65)
    message = r"a\.bin contains token id 64 and model\.vocab_size=61 .* set model\.vocab_size=65"
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "a", vocab_size=61)
    open_data(tmp_path / "a", vocab_size=65, valid_fraction=0.0)


def test_prefixes_of_different_tokenizers_are_refused(tmp_path):
    for name in "ab":
        with IndexedWriter(tmp_path / name, 1000, EOD, name.encode() * 32) as writer:
            writer.add([1, 2, 3] * 10)
    with pytest.raises(DataError, match="come from different tokenizers; prepare both with"):
        open_data(tmp_path / "a", tmp_path / "b")


def test_one_document_cannot_be_split_and_the_error_says_so(tmp_path):
    write_tokens(tmp_path / "a", [[1] * 100])
    with pytest.raises(DataError, match=r"0 tokens in 0 valid documents .*data\.valid_fraction"):
        open_data(tmp_path / "a")


def test_a_blend_holds_out_what_there_is(tmp_path):
    write_tokens(tmp_path / "one", [[1] * 100])
    write_tokens(tmp_path / "many", numbered_documents(50))
    data = open_data(tmp_path / "one", tmp_path / "many")
    assert data.valid.len_or_none == 5


def test_the_fingerprint_changes_with_the_content(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    first = open_data(tmp_path / "a").fingerprint
    assert open_data(tmp_path / "a", seed=2).fingerprint == first
    write_tokens(tmp_path / "a", numbered_documents(50)[::-1])
    assert open_data(tmp_path / "a").fingerprint != first


def test_a_foreign_tokenizer_beside_the_tokens_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "a", 1000, EOD, b"x" * 32) as writer:
        writer.add([1, 2, 3] * 50)
    tokenizer_path(tmp_path / "a").write_bytes(b"another")
    with pytest.raises(DataError, match="is not the tokenizer"):
        open_data(tmp_path / "a", valid_fraction=0.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_corpus_trains_without_a_cache(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
    try:
        assert open_data(tmp_path / "a").train[0].shape == (10,)
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_cache_that_cannot_be_written_beside_the_corpus_is_done_without(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    (tmp_path / "a.cache").write_text("a file where the folder would be")
    assert open_data(tmp_path / "a").train[0].shape == (10,)


def test_a_named_cache_folder_that_cannot_be_written_is_refused(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir=.*file can't be written"):
        open_data(tmp_path / "a", cache_dir=str(tmp_path / "file"))


def test_index_caches_lie_in_the_named_folder(tmp_path):
    write_tokens(tmp_path / "a", numbered_documents(50))
    open_data(tmp_path / "a", cache_dir=str(tmp_path / "x" / "y"))
    names = sorted(path.name for path in (tmp_path / "x" / "y").iterdir())
    assert [name.rsplit("-", 1)[0] for name in names] == ["a-train-epoch0", "a-valid-epoch0"]


def test_the_unigram_entropy_is_that_of_held_out_tokens_under_training_frequencies(tmp_path):
    write_tokens(tmp_path / "a", [[1, 2] * 500] * 10, vocab_size=3)
    data = open_data(tmp_path / "a", vocab_size=3)
    # 9000 training tokens, half of them 1 and half 2; add one to each of three counts.
    assert data.unigram_entropy() == pytest.approx(-math.log(4501 / 9003), rel=1e-12)


def test_synthetic_data_needs_no_files():
    data = open_data("synthetic", vocab_size=61)
    assert data.train.len_or_none is None
    assert data.valid.len_or_none == 64
    assert data.train[10**9].shape == (10,)
    assert 1 < data.unigram_entropy() < math.log(61) + 0.1
    assert open_data("synthetic:13", repeat=False).train.len_or_none == 13


@pytest.mark.parametrize("paths", [["synthetic", "a"], ["a", "synthetic"], ["synthetic:x"]])
def test_synthetic_data_mixed_or_miscounted_is_refused(paths):
    with pytest.raises(DataError, match="synthetic data is one path alone"):
        open_data(*paths)
