import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megagrid.data.corpus import Decoding, find_files
from megagrid.data.indexed import IndexedTokens, tokenizer_path
from megagrid.data.prepare import Request, _map_in_order, _sample, cut_passages, prepare
from megagrid.data.tokenizer import ByteTokenizer, load_tokenizer
from megagrid.errors import DataError
from tests.data.files import TEXT, small_tokenizer
from tests.data.test_tokenizer import foreign_model

BYTES = ByteTokenizer()


def jsonl(*texts: str, key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def documents(prefix: Path) -> list[str]:
    tokens = IndexedTokens(prefix)
    tokenizer = load_tokenizer(tokenizer_path(prefix))
    return [tokenizer.decode(tokens.document(i)) for i in range(len(tokens))]


def prepare_bytes(tmp_path: Path, *inputs: Path | str, **options: object) -> list[str]:
    request = Request([str(i) for i in inputs], tmp_path / "out", "bytes", **options)
    prepare(request)
    return documents(tmp_path / "out")


STORED = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".zst": lambda raw: zstandard.compress(raw[:9]) + zstandard.compress(raw[9:]),
}


@pytest.mark.parametrize("suffix", STORED)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", jsonl("one", "two\n", "drei ≠"), ["one", "two\n", "drei ≠"]),
        ("a.txt", b"one\n\ntwo\r\n", ["one\n\ntwo\r\n"]),
        ("a.py", "\ufeffeins".encode(), ["eins"]),
    ],
)
def test_text_and_json_lines_are_read_plain_or_compressed(
    tmp_path, suffix, name, content, expected
):
    path = tmp_path / (name + suffix)
    path.write_bytes(STORED[suffix](content))
    assert prepare_bytes(tmp_path, path) == expected


def test_every_document_ends_with_one_eod_that_its_length_counts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl("abc", "de", "</s>"))
    prepare_bytes(tmp_path, tmp_path / "a.jsonl")
    tokens = IndexedTokens(tmp_path / "out")
    assert tokens.lengths.tolist() == [4, 3, 5]
    assert tokens.header.tokens == 12
    assert np.flatnonzero(tokens.tokens == BYTES.eod_id).tolist() == [3, 6, 11]


@pytest.mark.parametrize("options", [{}, {"bos_id": -1}, {"bos_id": 2, "eos_id": 1}])
def test_documents_are_separated_by_eod_alone_whatever_the_bos(tmp_path, options):
    model = tmp_path / "m.model"
    model.write_bytes(foreign_model(**options))
    (tmp_path / "a.jsonl").write_bytes(jsonl("branch </s>", "</s>", "leaf"))
    prepare(Request([str(tmp_path / "a.jsonl")], tmp_path / "out", str(model)))
    tokens = IndexedTokens(tmp_path / "out")
    eod = load_tokenizer(model).eod_id
    ends = np.flatnonzero(tokens.tokens == eod)
    assert ends.tolist() == (np.cumsum(tokens.lengths) - 1).tolist()
    assert documents(tmp_path / "out") == ["branch </s>", "</s>", "leaf"]


def test_a_model_whose_bos_is_its_eos_separates_documents(tmp_path):
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    proto = model_pb2.ModelProto.FromString(small_tokenizer().model)
    proto.trainer_spec.bos_piece = proto.trainer_spec.eos_piece
    model = tmp_path / "m.model"
    model.write_bytes(proto.SerializeToString())
    (tmp_path / "a.jsonl").write_bytes(jsonl("branch", "</s>", "leaf"))
    prepare(Request([str(tmp_path / "a.jsonl")], tmp_path / "out", str(model)))
    tokens = IndexedTokens(tmp_path / "out")
    ends = np.flatnonzero(tokens.tokens == load_tokenizer(model).eod_id)
    assert ends.tolist() == (np.cumsum(tokens.lengths) - 1).tolist()


def test_a_tokenizer_without_eod_is_refused_unless_none_is_wanted(tmp_path):
    model = tmp_path / "m.model"
    model.write_bytes(foreign_model(eos_id=-1))
    (tmp_path / "a.jsonl").write_bytes(jsonl("branch"))
    request = Request([str(tmp_path / "a.jsonl")], tmp_path / "out", str(model))
    message = r"m\.model has no end-of-document token .*--train-tokenizer, .*--no-append-eod"
    with pytest.raises(DataError, match=message):
        prepare(request)
    prepare(Request(request.inputs, request.output, request.tokenizer, append_eod=False))
    assert IndexedTokens(tmp_path / "out").header.eod_id is None
    assert documents(tmp_path / "out") == ["branch"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """About 5 MB in files of several kinds, so that there are more blocks than workers."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{i} {TEXT * (i % 40)}" for i in range(500)]
    (folder / "a.jsonl").write_bytes(jsonl(*texts))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(*texts[::-1])))
    (folder / "c.txt").write_text(TEXT)
    return folder


def test_the_output_does_not_depend_on_the_number_of_workers(corpus, tmp_path):
    model = tmp_path / "m.model"
    model.write_bytes(small_tokenizer().model)
    reported = {}
    for workers in (1, 3):
        done = []
        prepare(
            Request([str(corpus)], tmp_path / str(workers), str(model), workers=workers),
            lambda what, count, done=done: done.append(count),
        )
        reported[workers] = sum(done)
    for suffix in (".bin", ".idx", ".tokenizer.model"):
        one, three = ((tmp_path / f"{n}{suffix}").read_bytes() for n in (1, 3))
        assert one == three
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert reported == {1: size, 3: size}


def test_a_new_tokenizer_is_trained_on_the_input_and_kept_beside_it(corpus, tmp_path):
    summary = prepare(
        Request([str(corpus)], tmp_path / "out", None, vocab_size=350, training_bytes=200_000)
    )
    assert summary.vocab_size == 350
    assert summary.documents == 1001
    assert documents(tmp_path / "out")[-1] == TEXT
    assert IndexedTokens(tmp_path / "out").tokenizer() == tokenizer_path(tmp_path / "out")


def test_documents_without_text_are_dropped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl("", "a") + b"  \n" + jsonl("", "b"))
    summary = prepare(Request([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes"))
    assert (summary.documents, summary.empty_documents) == (2, 2)
    assert summary.text_bytes == 2


def test_blank_lines_separate_documents_where_asked(tmp_path):
    (tmp_path / "a.txt").write_text("\n\none\nmore\n \n\ntwo\n\n")
    found = prepare_bytes(tmp_path, tmp_path / "a.txt", text_format="blank-line")
    assert found == ["one\nmore\n", "two\n"]


def test_another_json_key_can_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl("x", key="content"))
    found = prepare_bytes(tmp_path, tmp_path / "a.jsonl", decoding=Decoding(json_key="content"))
    assert found == ["x"]


def test_files_folders_and_patterns_are_read_in_order_and_each_once(tmp_path):
    for name in ("d/b.txt", "d/sub/a.txt", "d/.hidden", "d/.git/x", "e1.txt", "e2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs = ("e2.txt", "d", "e*.txt", "d/sub/../b.txt", "d/**/*.txt")
    found = find_files([str(tmp_path / name) for name in inputs])
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["e2.txt", "d/b.txt", "d/sub/a.txt", "e1.txt"]


def test_a_file_name_with_pattern_characters_is_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert prepare_bytes(tmp_path, tmp_path / "a[1].txt") == ["x"]


BAD_INPUT = {
    "no JSON": ("a.jsonl", jsonl("a") + b"{nope\n", r"a\.jsonl:2: not a line of JSON"),
    "cut off": ("a.jsonl", jsonl("a") + b'{"text": "b', r"a\.jsonl:2: not a line of JSON"),
    "an array": ("a.jsonl", b'["a"]\n', r"a\.jsonl:1: a list where an object is expected"),
    "no key": (
        "a.jsonl",
        jsonl("a", key="body"),
        r"a\.jsonl:1: key \"text\" is missing \(found: body",
    ),
    "a number": ("a.jsonl", b'\n{"text": 5}\n', r"a\.jsonl:2: key \"text\" is not a string"),
    "nested": ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not a line of JSON \(nested"),
    "long number": ("a.jsonl", b"9" * 5000, r"a\.jsonl:1: not a line of JSON \(a number"),
    "half a pair": ("a.jsonl", b'{"text": "\\ud83d"}', r"a\.jsonl:1: .*surrogate.*--invalid-utf8"),
    "latin-1 JSON": ("a.jsonl", b'\n{"text": "\xe9"}', r"a\.jsonl:2: byte 0xe9 is not UTF-8"),
    "latin-1": ("a.txt", b"a\nb\n\xe9t\xe9", r"a\.txt:3: byte 0xe9 is not UTF-8; .*--invalid-utf8"),
    "no gzip": ("a.txt.gz", b"plain text", r"a\.txt\.gz can't be read"),
    "half a gzip": ("a.txt.gz", gzip.compress(b"x" * 99)[:-9], r"a\.txt\.gz is damaged or trunc"),
    "no zstd": ("a.txt.zst", b"plain text", r"a\.txt\.zst is damaged or truncated"),
    "half a zstd": (
        "a.txt.zst",
        zstandard.compress(np.random.default_rng(0).bytes(300_000))[:-9],
        r"a\.txt\.zst is damaged or truncated \(it ends in the middle",
    ),
    "nothing": ("a.txt", b"", "the input has no tokens"),
}


# One error of a worker and one of the reader are enough to see that errors leave the pool.
@pytest.mark.parametrize(
    ("case", "workers"), [*((case, 1) for case in BAD_INPUT), ("no JSON", 2), ("half a zstd", 2)]
)
def test_bad_input_is_refused_by_file_and_line_and_leaves_nothing_behind(tmp_path, case, workers):
    name, content, message = BAD_INPUT[case]
    (tmp_path / name).write_bytes(content)
    request = Request([str(tmp_path / name)], tmp_path / "out", "bytes", workers=workers)
    with pytest.raises(DataError, match=message) as error:
        prepare(request)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_invalid_text_can_be_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud83db"}\n{"text": "\xe9"}\n')
    decoding = Decoding(invalid_utf8="replace")
    found = prepare_bytes(tmp_path, tmp_path / "a.jsonl", decoding=decoding)
    assert found == ["a\ufffdb", "\ufffd"]


@pytest.mark.parametrize("missing", ["none.txt", "none/*.txt", "empty"])
def test_an_input_that_names_no_file_is_refused(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"--input .* names no file; give files, folders or glob"):
        prepare(Request([str(tmp_path / missing)], tmp_path / "out", "bytes"))


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    with pytest.raises(DataError, match="names no file"):
        prepare(Request([""], tmp_path / "out", "bytes"))


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [link_to_nothing, link_to_itself, os.mkfifo])
def test_a_folder_with_what_cannot_be_read_is_refused_without_a_hang(tmp_path, make):
    (tmp_path / "texts").mkdir()
    make(tmp_path / "texts" / "odd")
    with pytest.raises(DataError, match=r"texts/odd is a broken link or no file; remove it"):
        prepare(Request([str(tmp_path / "texts")], tmp_path / "out", "bytes"))


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out can't be written .*--output"):
        prepare(Request([str(tmp_path / "a.txt")], tmp_path / "file" / "out", "bytes"))


def test_output_folders_are_made(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    prepare(Request([str(tmp_path / "a.txt")], tmp_path / "x" / "y" / "out", "bytes"))
    assert documents(tmp_path / "x" / "y" / "out") == ["x"]


def test_a_failed_preparation_leaves_the_earlier_one_alone(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    prepare_bytes(tmp_path, tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(DataError):
        prepare_bytes(tmp_path, tmp_path / "b.jsonl")
    assert documents(tmp_path / "out") == ["first"]


def test_passages_join_to_the_text_and_are_cut_at_line_ends():
    text = "a" * 25 + "\n" + "bc\n" * 20
    passages = list(cut_passages(text, 10))
    assert "".join(passages) == text
    assert max(map(len, passages)) <= 10
    assert passages[:4] == ["a" * 10, "a" * 10, "a" * 5 + "\nbc\n", "bc\nbc\nbc\n"]


def test_a_sample_of_passages_is_even_ordered_and_repeatable():
    passages = [f"{i:04}" for i in range(1000)]
    kept = _sample(passages, 100)
    assert kept == sorted(kept) == _sample(passages, 100)
    assert len(set(kept)) == 100
    assert 35 <= sum(passage < "0500" for passage in kept) <= 65
    assert _sample(passages, 5000) == passages


def _die(block: object) -> None:
    os._exit(9)


def test_a_killed_worker_is_an_error_and_no_hang():
    with pytest.raises(DataError, match=r"process was killed, .* fewer than --workers 2"):
        list(_map_in_order(_die, ["a", "b", "c"], workers=2))


def test_errors_cross_process_borders():
    assert str(pickle.loads(pickle.dumps(DataError("a.jsonl:3: bad")))) == "a.jsonl:3: bad"
