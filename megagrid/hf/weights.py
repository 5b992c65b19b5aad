"""The safetensors files of a folder, as one set of named tensors that are read slice by slice.

    model.safetensors                    all of them, or
    model.safetensors.index.json         {"weight_map": {tensor: file, ...}}, and
    model-00001-of-00003.safetensors ... the files that it names

Nothing else is opened: pytorch_model.bin and its kind are pickles, and reading one runs what it
says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megagrid.errors import CheckpointError
from megagrid.hf.config import read_raw

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `code` is what the file calls its dtype."""

    file: str
    shape: tuple[int, ...]
    code: str


class Weights:
    """The tensors of `folder`: where each lies, and their values on request.

    Attributes:
        stored: by name.

    Raises:
        CheckpointError: a file is missing or damaged, or the index doesn't tell the truth.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Stored] = {}
        for file, names in _files(folder).items():
            self.stored |= self._look_into(file, names)

    def read(self, name: str, rectangle: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor `name`, or a rectangle of it; the rest of its file stays unread."""
        # Opened anew each time: files are mapped, and what has been read would count as memory for
        # as long as they are.
        with self._open(self.stored[name].file) as handle:
            if rectangle is None:
                return handle.get_tensor(name)
            return handle.get_slice(name)[rectangle]

    def _look_into(self, file: str, names: list[str] | None) -> dict[str, Stored]:
        """What the header of `file` says of `names`; None: of all that it holds."""
        found = {}
        with self._open(file) as handle:
            held = set(handle.keys())
            for name in sorted(held) if names is None else names:
                if name not in held:
                    raise CheckpointError(
                        f"{self.folder / file} lacks {name}, which {INDEX} says it holds; fetch "
                        "the file again"
                    )
                header = handle.get_slice(name)
                found[name] = Stored(file, tuple(header.get_shape()), header.get_dtype())
        return found

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = self.folder / file
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} isn't a regular file; fetch it again")
        try:
            with safe_open(path, framework="pt") as handle:
                yield handle
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} isn't a safetensors file: {error}; fetch it again"
            ) from None


def _files(folder: Path) -> dict[str, list[str] | None]:
    """File -> the tensors to be read from it; None: all.

    Raises:
        CheckpointError: there are none.
    """
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as {pickles[0]}, a pickle, which megagrid never reads; save "
            f"them as safetensors ({SINGLE}) where you trust them"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; fetch its weights too")


def _indexed(path: Path) -> dict[str, list[str] | None]:
    weight_map = read_raw(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path} has no "weight_map" of tensors to files')
    files: dict[str, list[str] | None] = defaultdict(list)
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and Path(file).name == file and file.isprintable()
        if not is_name or "\\" in file:
            raise CheckpointError(
                f"{path}: {name} lies in {file!r}, which isn't the name of a file in the folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name} lies in {file!r}, which isn't a safetensors file; megagrid reads "
                "no other"
            )
        files[file].append(name)
    return files
