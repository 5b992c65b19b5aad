"""Names for files that aren't finished."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody else uses; renaming it to ``path`` is atomic."""
    return path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
