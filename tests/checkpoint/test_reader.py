"""Any rectangle of a tensor is read, however its checkpoint is cut; a file that lies is told of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrid.checkpoint import Entry, save
from megagrid.checkpoint.manifest import read_manifest
from megagrid.checkpoint.reader import NUMBERS, TensorReader, to_float64
from megagrid.checkpoint.storage import DTYPE_CODES, DTYPE_NAMES
from megagrid.errors import CheckpointError
from megagrid.nn.layout import Box
from tests.checkpoint.cuts import random_cut, slices_of

SHARD = "model-shard-00000.safetensors"


def save_cut(folder: Path, whole: torch.Tensor, boxes: list[Box]) -> Path:
    entries = [Entry("w", tuple(whole.shape), box, whole[slices_of(box)], True) for box in boxes]
    return save(folder, entries, {"step": 1})


def open_reader(checkpoint: Path) -> TensorReader:
    return TensorReader(checkpoint, read_manifest(checkpoint))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 9), (3, 1, 6)], ids=str)
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_any_rectangle_of_any_cut_is_read(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    rng = random.Random(str(shape))
    whole = (torch.rand(shape) * 100).to(dtype)
    everything = Box((0,) * len(shape), shape)
    reader = open_reader(save_cut(tmp_path, whole, random_cut(rng, everything, 3)))
    for box in [everything, *random_cut(rng, everything, 3)]:
        bits = reader.read("w", box.offsets, box.sizes)
        expected = whole[slices_of(box)].double().numpy()
        assert bits.shape == box.sizes
        assert np.array_equal(to_float64(bits, DTYPE_NAMES[dtype]), expected)


def test_rows_beyond_a_chunk_are_read_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megagrid.checkpoint.reader.CHUNK", 100)
    whole = torch.arange(35.0).reshape(7, 5)
    reader = open_reader(save_cut(tmp_path, whole, [Box((0, 0), (7, 5))]))
    bits = reader.read("w", (1, 2), (6, 2))
    assert np.array_equal(bits.view("<f4"), whole[1:, 2:4].numpy())


def test_every_dtype_that_is_saved_is_read() -> None:
    codes = {name: number.code for name, number in NUMBERS.items()}
    assert codes == {DTYPE_NAMES[dtype]: code for dtype, code in DTYPE_CODES.items()}


def with_header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """A file whose header was changed, of the same length."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        text = json.dumps(header if changed is None else changed, separators=(",", ":")).encode()
        return data[:8] + text.ljust(length)[:length] + data[8 + length :]

    return rewrite


LIES = {
    "empty": lambda data: b"",
    "ends in the header": lambda data: data[:20],
    "ends in the data": lambda data: data[:-4],
    "header longer than the file": lambda data: b"\xff" * 8 + data[8:],
    "no JSON": lambda data: data[:8] + b"?" * 40 + data[48:],
    "no table": with_header(lambda header: []),
    "another dtype": with_header(lambda header: header["w"].update(dtype="I32")),
    "another shape": with_header(lambda header: header["w"].update(shape=[6, 4])),
    "another name": with_header(lambda header: {"v": header["w"]}),
    "no offsets": with_header(lambda header: header["w"].pop("data_offsets")),
    "outside": with_header(lambda header: header["w"].update(data_offsets=[-4, 92])),
    "words for numbers": with_header(lambda header: header["w"].update(data_offsets=["a", "b"])),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_isnt_what_the_manifest_says_is_one_line(lie: str, tmp_path: Path) -> None:
    checkpoint = save_cut(tmp_path, torch.ones(4, 6), [Box((0, 0), (4, 6))])
    reader = open_reader(checkpoint)
    path = checkpoint / SHARD
    path.write_bytes(LIES[lie](path.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{SHARD} is damaged: ") as error:
        reader.read("w", (0, 0), (4, 6))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checkpoint = save_cut(tmp_path, torch.ones(4, 6), [Box((0, 0), (4, 6))])
    (checkpoint / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing"):
        open_reader(checkpoint).read("w", (0, 0), (4, 6))
