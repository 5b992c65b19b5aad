"""What of a Hugging Face folder has no meaning here, but goes with the weights and back again.

    folder                   run or converted checkpoint         folder
    config.json              huggingface.config.json             config.json, brought up to date
    generation_config.json   huggingface.generation_config.json  as it was
    tokenizer.json, ...      huggingface.tokenizer.json, ...     as they were

A run that starts from such a folder keeps them below its own, and puts them into every checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megagrid.errors import CheckpointError

PREFIX = "huggingface."
RUN_FOLDER = "huggingface"
GENERATION = "generation_config.json"

TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
FILES = ("config.json", GENERATION, *TOKENIZER_FILES)
"""All that is carried; a README or a picture isn't."""


def of_folder(folder: Path) -> dict[str, Path]:
    """The files to carry of a folder in Hugging Face's layout: their name on the way -> file."""
    return {PREFIX + name: folder / name for name in FILES if (folder / name).is_file()}


def of_checkpoint(checkpoint: Path) -> dict[str, Path]:
    """The files that a checkpoint, or a run's folder of them, carries: name -> file."""
    if not checkpoint.is_dir():
        return {}
    return {path.name: path for path in sorted(checkpoint.glob(f"{PREFIX}*"))}


def take(source: Path, run_folder: Path) -> None:
    """Keep what `source` carries, a checkpoint or a Hugging Face folder, below a run's folder."""
    files = of_checkpoint(source) or of_folder(source)
    target = run_folder / RUN_FOLDER
    try:
        if target.exists():
            shutil.rmtree(target)
        if files:
            target.mkdir(parents=True)
        for name, path in files.items():
            shutil.copyfile(path, target / name)
    except OSError as error:
        raise CheckpointError(
            f"copying what {source} carries to {target} failed: {error.strerror}"
        ) from None


def of_run(run_folder: Path) -> list[Path]:
    """What a run puts into its checkpoints."""
    return list(of_checkpoint(run_folder / RUN_FOLDER).values())


def own_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer of the data that a checkpoint was trained on; None: there is none."""
    found = sorted(checkpoint.glob("*.tokenizer.model"))
    return next((path for path in found if not path.name.startswith(PREFIX)), None)


def tokenizer_names(checkpoint: Path) -> list[str]:
    """The tokenizer's files that are carried, as a Hugging Face folder calls them."""
    return [name for name in TOKENIZER_FILES if (checkpoint / f"{PREFIX}{name}").is_file()]


def their_tokenizer(checkpoint: Path) -> Path | None:
    """The sentencepiece model that the weights came with; None: there is none."""
    path = checkpoint / f"{PREFIX}tokenizer.model"
    return path if path.is_file() else None
