"""manifest.json: what a checkpoint holds, and the proof that it is whole. Read without torch.

    {
    "format": 1, "megagrid": "0.1.0", "step": 100,
    "files": {
    "model-shard-00000.safetensors": {"size": 51616, "crc32": "0e9c2a11"}, ...
    },
    "tensors": {
    "layers.0.mlp.w1.weight": {"shape": [64, 32], "dtype": "float32", "boxes": [
        ["model-shard-00000.safetensors", [0, 0], [32, 32]], ...]}, ...       (one line)
    },
    "crc32": "6c1f8a02"
    }

A box is [file, offsets, sizes]. The last line sums up the lines before it. The manifest is written
after everything else, so a folder without one is no checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrid import __version__
from megagrid.checkpoint.files import FileRecord, read_record
from megagrid.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
TRAINER_STATE = "trainer.json"
CONFIG = "config.toml"

OPTIMIZER_PREFIX = "optimizer."
"""How the names of optimizer states begin; no weight's does."""


@dataclass(frozen=True)
class SavedBox:
    """A rectangle of a tensor, and the file that holds it under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor of a checkpoint; its boxes fill it without overlap.

    Attributes:
        dtype: as torch calls it, without "torch.".
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        version: the megagrid that wrote it.
    """

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, SavedTensor]
    version: str = __version__

    def to_bytes(self) -> bytes:
        text = _render(
            {
                "format": FORMAT,
                "megagrid": self.version,
                "step": self.step,
                "files": {
                    name: {"size": file.size, "crc32": file.crc32}
                    for name, file in sorted(self.files.items())
                },
                "tensors": {
                    name: {
                        "shape": tensor.shape,
                        "dtype": tensor.dtype,
                        "boxes": [[box.file, box.offsets, box.sizes] for box in tensor.boxes],
                    }
                    for name, tensor in sorted(self.tensors.items())
                },
            }
        )
        return f'{text},\n"crc32": "{_crc(text)}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of `to_bytes`.

        Raises:
            ValueError, KeyError, TypeError: `data` is something else.
        """
        body: dict[str, Any] = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("it isn't a JSON object")
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']} isn't {FORMAT}, the one that is read here")
        stated = body.pop("crc32")
        if stated != _crc(_render(body)):
            raise ValueError("it doesn't match its own checksum")
        return cls(
            step=body["step"],
            files={_plain(name): FileRecord(**file) for name, file in body["files"].items()},
            tensors={
                name: SavedTensor(
                    shape=tuple(tensor["shape"]),
                    dtype=tensor["dtype"],
                    boxes=tuple(
                        SavedBox(_plain(file), tuple(offsets), tuple(sizes))
                        for file, offsets, sizes in tensor["boxes"]
                    ),
                )
                for name, tensor in body["tensors"].items()
            },
            version=body["megagrid"],
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of the folder `checkpoint`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = checkpoint / FILE_NAME
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise CheckpointError(f"{path} isn't a regular file; name another checkpoint")
        return Manifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        reason = "its save never ended" if checkpoint.is_dir() else "there is no such folder"
        raise CheckpointError(f"{checkpoint} has no {FILE_NAME}: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def find_damage(
    checkpoint: Path, files: Iterable[tuple[str, FileRecord]], *, deep: bool
) -> list[str]:
    """One line for each of the files that isn't what the manifest says.

    Args:
        files: names and records, all of the manifest's or a share of them.
        deep: read them and compare checksums; otherwise compare sizes alone.
    """
    problems = []
    for name, stated in files:
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != stated.size:
                problems.append(f"{name} has {size} bytes instead of {stated.size}")
            elif deep and (crc32 := read_record(path).crc32) != stated.crc32:
                problems.append(f"{name} has checksum {crc32} instead of {stated.crc32}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} can't be read: {error.strerror}")
    return problems


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What the trainer gave as its state.

    Raises:
        CheckpointError: it is missing or isn't what the manifest says.
    """
    stated = read_manifest(checkpoint).files.get(TRAINER_STATE)
    if stated is None:
        raise CheckpointError(
            f"{checkpoint} holds no {TRAINER_STATE}: it is of weights alone, "
            "which a run begins with by checkpoint.initialize_from"
        )
    if problems := find_damage(checkpoint, [(TRAINER_STATE, stated)], deep=True):
        raise CheckpointError(f"{checkpoint} is damaged: {problems[0]}")
    try:
        return json.loads((checkpoint / TRAINER_STATE).read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is damaged: {TRAINER_STATE}: {error}") from None


def state_kind(state: str) -> str:
    """Which of an optimizer's states of a weight the tensor of that name is, as "exp_avg"."""
    return state.removeprefix(OPTIMIZER_PREFIX).partition(".")[0]


def weight_of(state: str) -> str:
    """The weight that the optimizer state `state` belongs to, by their names."""
    return state.removeprefix(OPTIMIZER_PREFIX).partition(".")[2]


def _render(body: Mapping[str, Any]) -> str:
    """JSON with a line per file and per tensor, without the closing brace."""
    lines = []
    for key, value in body.items():
        if isinstance(value, Mapping):
            rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines)


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _plain(name: str) -> str:
    """`name`, if it is a file's name and not a path out of the checkpoint."""
    if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
        raise ValueError(f"{name!r} isn't the name of a file in it")
    return name
