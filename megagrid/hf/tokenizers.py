"""A tokenizer of ours as the files that transformers' AutoTokenizer reads."""

from __future__ import annotations

import json
from pathlib import Path

from megagrid.data.tokenizer import ByteTokenizer, Tokenizer

_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of the files in the folder."""
    if isinstance(tokenizer, ByteTokenizer):
        return _of_bytes(tokenizer)
    return _of_sentencepiece(tokenizer)


def _of_sentencepiece(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The model as it is: transformers' LlamaTokenizer reads it, and adds nothing to a text."""
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
    }
    return {"tokenizer.model": tokenizer.model, "tokenizer_config.json": _json(settings)}


def _of_bytes(tokenizer: ByteTokenizer) -> dict[str, bytes]:
    """A byte-level BPE without merges, GPT-2's way of writing bytes as characters."""
    eod = "<|endoftext|>"
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    content = {
        "version": "1.0",
        "added_tokens": [{"id": tokenizer.eod_id, "content": eod, "special": True, **special}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eod,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": _json(content), "tokenizer_config.json": _json(settings)}


def _byte_characters() -> list[str]:
    """A printable character for each byte: itself, or one from U+0100 on (GPT-2's encoder)."""
    kept = {byte for some in _PRINTABLE for byte in some}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """`files` by name into `folder`."""
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
