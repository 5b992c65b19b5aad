import mmap
import struct

import numpy as np
import pytest

from megagrid.data.indexed import (
    Header,
    IndexedTokens,
    IndexedWriter,
    bin_path,
    dtype_for,
    edges_digest,
    idx_path,
    tokenizer_path,
    write_index,
)
from megagrid.errors import DataError
from tests.data.files import EOD, numbered_documents, write_tokens


def test_documents_come_back_as_written(tmp_path):
    documents = [[5, 6, 7, EOD], [EOD], [9, EOD]]
    tokens = write_tokens(tmp_path / "a", documents)
    assert [tokens.document(i).tolist() for i in range(len(tokens))] == documents
    assert tokens.lengths.tolist() == [4, 1, 2]
    assert tokens.header.max_id == 9
    assert tokens.header.eod_id == EOD
    tokens.verify()


def test_the_bin_file_is_the_tokens_and_nothing_else(tmp_path):
    write_tokens(tmp_path / "a", [[1, 2], [513]])
    assert bin_path(tmp_path / "a").read_bytes() == b"\x01\x00\x02\x00\x01\x02"


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(2, "uint16"), (65536, "uint16"), (65537, "uint32"), (1 << 32, "uint32"), (1 << 33, "uint64")],
)
def test_the_type_is_the_smallest_that_holds_the_vocabulary(vocab_size, name):
    assert dtype_for(vocab_size).name == name


def test_id_69999_of_a_vocabulary_of_70000_comes_back(tmp_path):
    tokens = write_tokens(tmp_path / "a", [[69999, 4463, 0]], vocab_size=70000)
    assert tokens.document(0).tolist() == [69999, 4463, 0]


@pytest.mark.parametrize("dtype", ["uint16", "uint8", "int32", "float32"])
def test_a_type_that_cannot_hold_the_vocabulary_is_refused(tmp_path, dtype):
    with pytest.raises(DataError, match=rf"{dtype} can't hold .* 70000; .* as uint32"):
        IndexedWriter(tmp_path / "a", 70000, None, dtype=dtype)


@pytest.mark.parametrize("bad", [-1, 1000, 70000])
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path, bad):
    with (
        pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 1000"),
        IndexedWriter(tmp_path / "a", 1000, None) as writer,
    ):
        writer.add([1, 2, 3])
        writer.add([4, bad])
    assert list(tmp_path.iterdir()) == []


def test_a_document_beyond_four_gibibytes_is_read_exactly(tmp_path):
    """Sparse: 3 documents of uint16 end at 2^32 + 2^21 bytes, where the fourth begins."""
    lengths = np.array([1 << 30, 1 << 30, 1 << 20, 5])
    prefix = tmp_path / "big"
    start = int(lengths[:3].sum())
    with bin_path(prefix).open("wb") as file:
        file.seek(2 * start)
        file.write(struct.pack("<5H", 11, 12, 13, 14, 15))
    size = int(lengths.sum())
    with bin_path(prefix).open("rb") as file:
        edges = edges_digest(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    header = Header(np.dtype("<u2"), 4, size, 100, None, 15, bytes(32), bytes(32), edges)
    write_index(idx_path(prefix), header, lengths)
    tokens = IndexedTokens(prefix)
    assert 2 * int(tokens.offsets[3]) > 1 << 32
    assert tokens.document(3).tolist() == [11, 12, 13, 14, 15]
    assert tokens.document(2)[-3:].tolist() == [0, 0, 0]


def test_an_interrupted_writer_leaves_the_old_files_alone(tmp_path):
    write_tokens(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", 1000, None) as writer:
        writer.add([7, 7])
        raise KeyboardInterrupt
    assert IndexedTokens(tmp_path / "a").document(0).tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_an_input_without_tokens_is_refused(tmp_path):
    with (
        pytest.raises(DataError, match=r"nothing to write to .*a\.bin: the input has no tokens"),
        IndexedWriter(tmp_path / "a", 1000, None),
    ):
        pass


def test_an_output_folder_that_does_not_exist_is_refused(tmp_path):
    with (
        pytest.raises(DataError, match=r"can't be written .*choose another --output"),
        IndexedWriter(tmp_path / "none" / "a", 1000, None),
    ):
        pass


def _cut(path, count):
    path.write_bytes(path.read_bytes()[:count])


def _flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "no index": (lambda p: idx_path(p).unlink(), r"a\.idx doesn't exist; write it with"),
    "no tokens": (lambda p: bin_path(p).unlink(), r"a\.bin doesn't exist; write it with"),
    "empty index": (lambda p: _cut(idx_path(p), 0), r"a\.idx is truncated: it is empty"),
    "empty tokens": (lambda p: _cut(bin_path(p), 0), r"a\.bin is truncated: it is empty"),
    "half a header": (lambda p: _cut(idx_path(p), 50), r"a\.idx is not an index"),
    "half the offsets": (
        lambda p: _cut(idx_path(p), -8),
        r"a\.idx is truncated: \d+ bytes instead",
    ),
    "half the tokens": (lambda p: _cut(bin_path(p), -2), r"a\.bin is truncated: 198 bytes instead"),
    "more tokens": (
        lambda p: bin_path(p).write_bytes(bytes(1000)),
        r"a\.bin is too long: 1000 bytes instead of 200",
    ),
    "other tokens": (lambda p: bin_path(p).write_bytes(bytes(200)), r"a\.bin is not what .*a\.idx"),
    "another format": (lambda p: _flip(idx_path(p), 0), r"a\.idx is not an index of tokens"),
    "another version": (lambda p: _flip(idx_path(p), 8), r"a\.idx has format version 0 .* reads 1"),
    "a flipped bit": (lambda p: _flip(idx_path(p), 20), r"a\.idx is damaged: its header fails"),
    "a moved document": (
        lambda p: _flip(idx_path(p), -12),
        r"a\.idx is damaged: its offsets fail",
    ),
    "wrong offsets": (lambda p: _flip(idx_path(p), -1), r"a\.idx is damaged: its offsets"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_by_name_and_with_the_remedy(tmp_path, damage):
    write_tokens(tmp_path / "a", numbered_documents(10))
    spoil, message = DAMAGES[damage]
    spoil(tmp_path / "a")
    with pytest.raises(DataError, match=f"{message}.*megagrid data prepare") as error:
        IndexedTokens(tmp_path / "a")
    assert "\n" not in str(error.value)


def test_verify_finds_a_changed_token_in_the_middle(tmp_path):
    tokens = write_tokens(tmp_path / "a", [list(range(1000)) * 200])
    _flip(bin_path(tmp_path / "a"), 200_000)
    with pytest.raises(DataError, match=r"a\.bin is damaged: its digest differs"):
        IndexedTokens(tokens.prefix).verify()


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "a", 1000, None, b"x" * 32) as writer:
        writer.add([1])
    tokens = IndexedTokens(tmp_path / "a")
    assert tokens.tokenizer() is None
    tokenizer_path(tmp_path / "a").write_bytes(b"another model")
    with pytest.raises(DataError, match=r"tokenizer\.model is not the tokenizer that .*a\.bin"):
        tokens.tokenizer()
