"""Text to token ids and back.

A tokenizer has no state but its model file, and only one special token matters to the data: the
end-of-document id (EOD), which `prepare` puts after every document. Text can't forge it: no text
encodes to it, not even the one that it is written as. Nothing is written at the start of a
document, so a model whose BOS and EOS are one id has nothing to confuse.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megagrid.errors import DataError

BYTES = "bytes"
"""The name by which `load_tokenizer` knows the tokenizer that has no file."""

# How sentencepiece writes a space inside its pieces: in text, it would come back as a space.
_SPACE_MARK = "\u2581"
_STRETCH = 2000


class Tokenizer(Protocol):
    """What the data layer asks of a tokenizer."""

    vocab_size: int
    eod_id: int | None
    """The end-of-document id; None: the model has none."""
    model: bytes
    """The content of the file that `load_tokenizer` reads."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without EOD."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; EOD and other control ids leave no trace."""


class ByteTokenizer:
    """One id a byte of UTF-8, and 256 for EOD."""

    model = b"megagrid byte tokenizer\n"
    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.eod_id).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model, made by `train_tokenizer` or by others.

    Text comes back exactly from models that fall back to bytes and add no space in front, as
    `train_tokenizer` makes them; what else a foreign model normalises is that model's affair.
    """

    def __init__(self, model: bytes, name: str):
        """``name``: what errors call the model. Errors: DataError if it isn't one."""
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            if not model:
                raise RuntimeError("the file is empty")
            self._pieces.load_from_serialized_proto(model)
        except RuntimeError as error:
            raise DataError(
                f"{name} is not a sentencepiece model ({_last_clause(error)}); "
                "pass a .model file, or train one with --train-tokenizer"
            ) from None
        self.vocab_size = self._pieces.get_piece_size()
        # Negative unless the piece is of sentencepiece's control type, which text never encodes to.
        eos = self._pieces.eos_id()
        self.eod_id = eos if eos >= 0 else None
        self._space_mark_ids = self._spell_space_mark()
        # Then text cut before a space gives the same ids in half the time: sentencepiece slows down
        # with the length of its input.
        self._divides_at_spaces = self._keeps_spaces() and self._no_piece_crosses_a_space()

    def encode(self, text: str) -> list[int]:
        if not self._space_mark_ids or _SPACE_MARK not in text:
            return self._encode_stretches(text)
        first, *others = text.split(_SPACE_MARK)
        ids = self._encode_stretches(first)
        for part in others:
            ids += self._space_mark_ids
            ids += self._encode_stretches(part)
        return ids

    def _encode_stretches(self, text: str) -> list[int]:
        if not self._divides_at_spaces:
            return self._pieces.encode(text)
        ids: list[int] = []
        for stretch in _cut_at_spaces(text):
            ids += self._pieces.encode(stretch)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode([int(i) for i in ids])

    def _keeps_spaces(self) -> bool:
        return self._pieces.decode(self._pieces.encode(" ")) == " "

    def _spell_space_mark(self) -> list[int]:
        """The mark in byte pieces; empty if the model has none, or adds a space before text."""
        ids = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        return ids if self._keeps_spaces() and all(map(self._pieces.is_byte, ids)) else []

    def _no_piece_crosses_a_space(self) -> bool:
        crossing = re.compile(f"[^{_SPACE_MARK}]{_SPACE_MARK}")
        return not any(map(crossing.search, map(self._pieces.id_to_piece, range(self.vocab_size))))

    def __reduce__(self):
        # The processor itself can't be pickled; its model is all there is to it.
        return type(self), (self.model, "pickled model")


def _cut_at_spaces(text: str) -> Iterator[str]:
    """``text`` in stretches of about `_STRETCH` characters, cut where a space begins."""
    start = 0
    while start < len(text):
        end = text.find(" ", start + _STRETCH)
        while end > 0 and text[end - 1] == " ":
            end = text.find(" ", end + 1)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a .model file, or `BYTES`.

    Errors: DataError if the file is missing or is no model.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"tokenizer {path} can't be read ({error.strerror}); "
            f'pass a sentencepiece .model file or "{BYTES}", or train one with --train-tokenizer'
        ) from None
    if model == ByteTokenizer.model:
        return ByteTokenizer()
    return SentencePieceTokenizer(model, str(path))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """A byte-pair model of ``vocab_size`` pieces that any text survives unchanged.

    ``texts``: lines or passages, at most a few thousand characters each.
    Errors: DataError if the texts don't give that many pieces, or need more.
    """
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=trained,
            vocab_size=vocab_size,
            model_type="bpe",
            # Unknown characters become bytes, and nothing is normalised: decode(encode(x)) == x.
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Indentation in one piece: a third fewer tokens on source code.
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 20,
            # A constant: it is stored in the model, whose content must not depend on the machine.
            num_threads=4,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:  # ValueError: more than an int holds
        raise DataError(_vocabulary_advice(vocab_size, str(error))) from None
    return SentencePieceTokenizer(trained.getvalue(), "the trained model")


def _vocabulary_advice(vocab_size: int, error: str) -> str:
    """What to tell the user about sentencepiece's refusal to train."""
    if match := re.search(r"set it to a value <= (\d+)", error):
        return (
            f"--vocab-size={vocab_size} is more than this corpus gives; "
            f"choose at most {match[1]}, or add text"
        )
    if match := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"--vocab-size={vocab_size} is too few for this corpus's characters and the 256 bytes; "
            f"choose at least {match[1]}"
        )
    return (
        f"sentencepiece can't train --vocab-size={vocab_size} on this corpus: {_last_clause(error)}"
    )


def _last_clause(error: object) -> str:
    """The readable end of sentencepiece's messages, which start with a C++ source line."""
    return str(error).split("] ")[-1].strip() or "its content is damaged"
