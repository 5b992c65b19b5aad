"""``megagrid data prepare`` and ``megagrid data inspect``."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from megagrid.config.arguments import path_argument
from megagrid.errors import DataError
from megagrid.terminal import ProgressBar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the two verbs to the parser of ``megagrid data``."""
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    _add_prepare(verbs.add_parser("prepare", help="text or JSON lines to a token file"))
    _add_inspect(verbs.add_parser("inspect", help="what is in a token file"))


def run(args: argparse.Namespace) -> int:
    """Runs the verb that was parsed; returns the exit status. Errors: DataError."""
    return {"prepare": _prepare, "inspect": _inspect}[args.data_verb](args)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders or glob patterns; .jsonl is read as JSON lines, all else as text; "
        "plain, .gz or .zst",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin, .idx, .tokenizer.model",
    )
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer", metavar="MODEL", help='a sentencepiece .model file, or "bytes"'
    )
    tokenizer.add_argument(
        "--train-tokenizer", action="store_true", help="train a sentencepiece model on the input"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=32000, metavar="N", help="of a trained tokenizer (32000)"
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="where JSON lines hold the text (text)"
    )
    parser.add_argument(
        "--document-separator",
        choices=("file", "blank-line"),
        default="file",
        help="what ends a document of plain text (file)",
    )
    parser.add_argument(
        "--invalid-utf8",
        choices=("error", "replace"),
        default="error",
        help="what to do about bytes that are no text (error)",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's EOD (on)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="tokenizing processes (one a core)",
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", type=path_argument, metavar="PREFIX")
    parser.add_argument(
        "--show", type=int, default=64, metavar="N", help="tokens of the start to decode (64)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare all tokens with their digest"
    )


def _prepare(args: argparse.Namespace) -> int:
    # Imported when needed: `megagrid --help` shouldn't wait for sentencepiece.
    from megagrid.data.corpus import Decoding, find_files
    from megagrid.data.prepare import Request, prepare

    if args.workers < 1 or args.vocab_size < 1:
        name, value = (
            ("workers", args.workers) if args.workers < 1 else ("vocab-size", args.vocab_size)
        )
        raise DataError(f"--{name}={value} must be at least 1")
    if args.output.endswith("/") or Path(args.output).name in ("", ".."):
        raise DataError(
            f'--output="{args.output}" names a folder; add how its files begin, as in '
            f'"{Path(args.output) / "text"}"'
        )
    request = Request(
        inputs=args.input,
        output=Path(args.output),
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        text_format=args.document_separator,
        decoding=Decoding(args.json_key, args.invalid_utf8),
        append_eod=args.append_eod,
        workers=args.workers,
    )
    total = sum(path.stat().st_size for path in find_files(args.input))
    began = time.perf_counter()
    with ProgressBar(total) as progress:
        summary = prepare(request, progress)
    seconds = time.perf_counter() - began
    print(f"documents   {summary.documents:,}" + _dropped(summary.empty_documents))
    print(f"tokens      {summary.tokens:,}, {summary.text_bytes / summary.tokens:.2f} bytes each")
    print(f"vocabulary  {summary.vocab_size:,} ids, stored as {summary.dtype.name}")
    print(f"time        {seconds:.1f} s, {summary.text_bytes / 1e6 / seconds:.1f} MB/s of text")
    print(f"written     {args.output}.bin, .idx, .tokenizer.model")
    print(f'in a recipe data.paths = ["{args.output}"], model.vocab_size = {summary.vocab_size}')
    return 0


def _dropped(count: int) -> str:
    return f" ({count:,} without text left out)" if count else ""


def _inspect(args: argparse.Namespace) -> int:
    import numpy as np

    from megagrid.data.entropy import entropy
    from megagrid.data.indexed import IndexedTokens
    from megagrid.data.tokenizer import load_tokenizer

    if args.show < 0:
        raise DataError(f"--show={args.show} must be at least 0")
    data = IndexedTokens(args.prefix)
    if args.verify:
        data.verify()
    header = data.header
    counts = np.zeros(header.vocab_size)
    # A stretch at a time: bincount makes an int64 copy of what it counts.
    for start in range(0, header.tokens, 1 << 22):
        counts += np.bincount(data.tokens[start : start + (1 << 22)], minlength=header.vocab_size)
    print(f"documents   {header.documents:,}")
    print(f"tokens      {header.tokens:,}, {header.tokens / header.documents:.1f} a document")
    print(
        f"vocabulary  {header.vocab_size:,} ids, {np.count_nonzero(counts):,} of them used, "
        f"largest {header.max_id}, stored as {header.dtype.name}"
    )
    print(f"eod id      {header.eod_id}")
    print(f"tokenizer   {header.tokenizer.hex()[:16]}")
    print(f"content     {header.content.hex()[:16]}" + (" (verified)" if args.verify else ""))
    print(f"entropy     {entropy(counts):.4f} nats a token (unigram)")
    if model := data.tokenizer():
        print(f"begins      {load_tokenizer(model).decode(data.tokens[: args.show])!r}")
    return 0
