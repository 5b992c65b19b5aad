"""What can be told of a recipe's Hugging Face folders before any rank starts. Pure, no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megagrid.checkpoint.manifest import FILE_NAME as MANIFEST
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError
from megagrid.hf.config import FILE_NAME, config_of, described

KEY = "checkpoint.initialize_from"
EXPORT_KEY = "checkpoint.export_hf"


def check_folders(config: Config) -> None:
    """Whether the run can begin from its folder, and its last weights be written as asked for.

    Raises:
        CheckpointError: it can't; names key and folder.
    """
    settings = config.checkpoint
    if settings.initialize_from is not None:
        path = Path(settings.initialize_from)
        if is_theirs(path):
            described(path)
    if settings.export_hf is not None:
        target = Path(settings.export_hf)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(
                f'{EXPORT_KEY}="{target}" is there already; name a new folder, or remove it'
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryDirectory(dir=target.parent).cleanup()
        except OSError as error:
            raise CheckpointError(
                f'{EXPORT_KEY}="{target}" can\'t be written to ({error.strerror}); name another'
            ) from None
        try:
            config_of(config.model, "float32", None, {})
        except CheckpointError as error:
            raise CheckpointError(f'{EXPORT_KEY}="{target}": {error}') from None


def is_theirs(path: Path) -> bool:
    """Whether it is a Hugging Face folder, and no checkpoint of ours.

    Raises:
        CheckpointError: it is no folder.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{KEY}=\"{path}\" isn't a folder; name a Hugging Face model's, a checkpoint's or a "
            "run's"
        )
    return (path / FILE_NAME).is_file() and not (path / MANIFEST).exists()
