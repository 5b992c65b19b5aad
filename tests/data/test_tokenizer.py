import io
import pickle

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrid.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from megagrid.errors import DataError
from tests.data.files import TEXT, small_tokenizer

TOKENIZERS = [ByteTokenizer(), small_tokenizer()]
AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\t\r\n",
    "\0 and \x7f",
    "</s><s><unk><0x41>",
    "\u2581 the mark of a space \u2581\u2581",
    "\ufeffbyte-order mark",
    "e\u0301 is not é, ﬁ is not fi",
    "漢字 🙂 \U0010ffff",
]


def foreign_model(**options: object) -> bytes:
    """A model made without this project's settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=model,
        minloglevel=2,
        **({"vocab_size": 400, "model_type": "bpe", "byte_fallback": True} | options),
    )
    return model.getvalue()


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "sentencepiece"])
@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_unchanged_and_never_contains_the_eod(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("literal", ["</s>", "<s>", "a</s>b", "</s></s>"])
def test_the_eod_written_as_text_is_text(literal):
    tokenizer = small_tokenizer()
    assert tokenizer.eod_id not in tokenizer.encode(literal)
    assert tokenizer.decode([*tokenizer.encode(literal), tokenizer.eod_id]) == literal


@given(st.text(st.sampled_from("ab  \n."), max_size=9000))
@settings(max_examples=20, deadline=None)
def test_long_text_has_the_ids_that_sentencepiece_gives_it_whole(text):
    tokenizer = small_tokenizer()
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    text = text * 3
    assert tokenizer.encode(text) == whole.encode(text)


def test_a_model_whose_pieces_cross_spaces_has_the_ids_of_the_whole_text():
    model = foreign_model(
        split_by_whitespace=False, add_dummy_prefix=False, remove_extra_whitespaces=False
    )
    whole = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = TEXT * 50
    assert SentencePieceTokenizer(model, "m").encode(text) == whole.encode(text)


def test_a_model_that_adds_a_space_in_front_adds_it_once():
    model = foreign_model()
    whole = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = "a \u2581 b " * 2000
    assert SentencePieceTokenizer(model, "m").encode(text) == whole.encode(text)


def test_a_trained_model_has_exactly_the_asked_number_of_pieces_and_is_reproducible():
    first, second = (train_tokenizer([TEXT] * 20, 333) for _ in range(2))
    assert first.vocab_size == 333
    assert first.model == second.model


@pytest.mark.parametrize(
    ("vocab_size", "advice"), [(100_000, r"choose at most \d+"), (10, r"choose at least \d+")]
)
def test_a_vocabulary_that_the_corpus_cannot_give_is_refused_with_the_limit(vocab_size, advice):
    with pytest.raises(DataError, match=rf"--vocab-size={vocab_size} .*{advice}"):
        train_tokenizer([TEXT] * 20, vocab_size)


def test_the_advised_limits_work():
    for vocab_size, pattern in ((100_000, "at most "), (10, "at least ")):
        with pytest.raises(DataError) as error:
            train_tokenizer([TEXT] * 20, vocab_size)
        limit = int(str(error.value).split(pattern)[1].split(",")[0])
        assert train_tokenizer([TEXT] * 20, limit).vocab_size == limit


def test_a_model_without_an_eos_piece_has_no_eod():
    assert SentencePieceTokenizer(foreign_model(eos_id=-1), "m").eod_id is None


def test_an_eos_that_text_can_spell_is_no_eod():
    model = foreign_model(user_defined_symbols=["</s>"])
    tokenizer = SentencePieceTokenizer(model, "m")
    assert tokenizer.eod_id is None


def test_a_model_without_bos_keeps_its_eod():
    tokenizer = SentencePieceTokenizer(foreign_model(bos_id=-1), "m")
    assert tokenizer.eod_id is not None
    assert tokenizer.eod_id not in tokenizer.encode("</s>")


def test_a_tokenizer_comes_back_from_its_file_and_from_a_pickle(tmp_path):
    for tokenizer in TOKENIZERS:
        path = tmp_path / "t.model"
        path.write_bytes(tokenizer.model)
        for copy in (load_tokenizer(path), pickle.loads(pickle.dumps(tokenizer))):
            assert copy.encode(TEXT) == tokenizer.encode(TEXT)
            assert (copy.vocab_size, copy.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)


@pytest.mark.parametrize("content", [b"", b"not a model", small_tokenizer().model[:700]])
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.model is not a sentencepiece model .*--train-tok"):
        load_tokenizer(path)


def test_a_missing_model_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"none\.model can't be read \(No such file"):
        load_tokenizer(tmp_path / "none.model")
    with pytest.raises(DataError, match="can't be read"):
        load_tokenizer(tmp_path)
