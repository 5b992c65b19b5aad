"""Real text that is on every machine: the Python standard library's own sources, as JSON lines.

    python tools/make_stdlib_corpus.py corpus.jsonl [--max-bytes 8000000]

One document a module, ``{"path": "json/decoder.py", "text": …}``. Tests and installed packages are
left out. Modules come in the order of a hash of their path, so that a size limit takes an even
sample of the library rather than its first letters; the same interpreter gives the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


def modules(library: Path) -> list[Path]:
    """The library's source files, relative to it, in their lasting random order."""
    found = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = (path for path in found if not SKIPPED_FOLDERS.intersection(path.parts))
    return sorted(kept, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def documents(library: Path, max_bytes: int | None) -> Iterator[tuple[Path, str]]:
    """(path, text) of each module, together at most ``max_bytes`` of UTF-8.

    A module that doesn't fit any more is passed over, smaller ones after it aren't.
    """
    left = sys.maxsize if max_bytes is None else max_bytes
    for path in modules(library):
        try:
            with tokenize.open(library / path) as file:  # minds the file's own coding line
                text = file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        size = len(text.encode())
        if 0 < size <= left:
            left -= size
            yield path, text


def main() -> None:
    """Writes the corpus and says how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="text to collect, at most")
    args = parser.parse_args()
    count = total = 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as file:
        for path, text in documents(Path(sysconfig.get_path("stdlib")), args.max_bytes):
            json.dump({"path": path.as_posix(), "text": text}, file)
            file.write("\n")
            count += 1
            total += len(text.encode())
    print(f"{count} documents, {total:,} bytes of text in {args.output}")


if __name__ == "__main__":
    main()
