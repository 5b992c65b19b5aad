"""A recipe that goes on with the training of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from megagrid.config.dump import toml_value
from megagrid.config.schema import ModelConfig

LONGEST_AT_FIRST = 2048
"""A model's longest input costs more memory than a first try should."""


def recipe_text(model: ModelConfig, source: Path, name: str) -> str:
    """The recipe as TOML.

    Args:
        source: what the run starts from: a converted checkpoint, or the folder itself.
        name: of the run.
    """
    keys = "".join(
        f"{key} = {toml_value(getattr(model, key))}\n"
        for key, field in ModelConfig.model_fields.items()
        if getattr(model, key) != field.default
    )
    return f"""\
# Goes on with the training of {source}.
# data.paths wants token files of this model's own tokenizer, by `megagrid data prepare`.

[model]
{keys}
[train]
seq_length = {min(model.max_seq_length, LONGEST_AT_FIRST)}
global_batch_size = 8
steps = 100
precision = "bf16"

[optimizer]
lr = 1e-5

[data]
paths = ["synthetic"]

[checkpoint]
initialize_from = {toml_value(str(source))}
resume = "latest"

[logging]
run_dir = {toml_value(f"runs/{name}")}
"""
