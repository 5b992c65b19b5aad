"""The recipe that tests bend: right in every key, so that one change is the only mistake."""

from __future__ import annotations

from pathlib import Path

TEXT = """\
[model]
num_layers = 4
hidden_size = 32
ffn_hidden_size = 64
num_heads = 8
num_kv_heads = 2
vocab_size = 61
max_seq_length = 32

[parallel]
tensor_parallel_size = 1

[train]
seq_length = 32
global_batch_size = 8
steps = 8

[optimizer]
lr = 1e-3

[data]
paths = ["synthetic"]

[logging]
run_dir = "runs/test"
"""


def write(folder: Path, text: str = TEXT) -> Path:
    """`text` as a recipe in `folder`."""
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path
