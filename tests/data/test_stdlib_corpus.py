import json
import subprocess
import sys
from pathlib import Path

from megagrid.data.corpus import find_files

TOOL = Path(__file__).parents[2] / "tools" / "make_stdlib_corpus.py"


def make(path: Path, *options: str) -> list[dict[str, str]]:
    subprocess.run([sys.executable, TOOL, path, *options], check=True, capture_output=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_modules_of_the_library_up_to_the_limit_and_repeatable(tmp_path):
    records = make(tmp_path / "x" / "a.jsonl", "--max-bytes", "300000")
    size = sum(len(record["text"].encode()) for record in records)
    assert 250_000 < size <= 300_000
    assert len(records) > 3
    assert all(record["path"].endswith(".py") for record in records)
    assert not any({"test", "site-packages"} & set(Path(r["path"]).parts) for r in records)
    assert make(tmp_path / "b.jsonl", "--max-bytes", "300000") == records
    assert len(find_files([str(tmp_path / "b.jsonl")])) == 1
