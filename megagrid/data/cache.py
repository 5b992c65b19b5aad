"""Arrays that are a function of their key, kept on disk so that one computation serves all ranks.

No rank waits for another: whoever finds nothing computes the array itself and renames it into
place, complete. Two who do so at once write the same bytes, so the order of their renames doesn't
matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megagrid.data.temporary import temporary_name
from megagrid.errors import DataError


class ArrayCache:
    """Arrays in one folder, one .npy file each, mapped rather than loaded.

    ``required``: a folder that can't be written is a DataError; otherwise its arrays stay in
    memory, as they must beside a corpus that is mounted read-only.
    """

    def __init__(self, folder: Path, required: bool):
        self.folder = folder
        self.required = required

    def get(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The array called ``name``, which must stand for everything that ``make`` depends on."""
        path = self.folder / f"{name}.npy"
        if (found := _read(path)) is not None:
            return found
        made = make()
        try:
            _write(path, made)
        except OSError as error:
            if self.required:
                raise DataError(
                    f"data.cache_dir={self.folder} can't be written ({error.strerror}); "
                    "name another folder"
                ) from None
            return made
        # Mapped, so that the ranks of a machine share its pages; None if somebody cleaned up since.
        mapped = _read(path)
        return made if mapped is None else mapped


def _read(path: Path) -> np.ndarray | None:
    """The array in ``path``; None if it isn't there, or not whole."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def _write(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
