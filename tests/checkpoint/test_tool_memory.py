"""Tools hold a tensor or less at a time, not the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, save
from megagrid.checkpoint.files import CHUNK
from megagrid.nn.layout import Box

MIB = 2**20
ROWS, COLUMNS, TENSORS = 512, 512, 64
LARGEST = ROWS * COLUMNS * 4
"""1 MiB; all of them 64."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak of a process"
)

MEASURE = """
import sys
from pathlib import Path
from megagrid.checkpoint.manifest import read_manifest
from megagrid.checkpoint.reader import TensorReader

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def growth(work):
    # The peak counts from here on. It is the process's own: that of getrusage begins with the
    # parent's.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before

def open_checkpoint(path):
    return TensorReader(Path(path), read_manifest(Path(path)))

def report(work, small, large):
    work(*small)  # imports and buffers
    print(growth(lambda: work(*large)))
    print(growth(lambda: bytes(range(256)) * (64 << 12)))  # the measure sees 64 MiB
"""

DIFF = """
from megagrid.checkpoint.diff import compare

def work(a, b):
    assert compare(open_checkpoint(a), open_checkpoint(b)).is_equal

report(work, sys.argv[1:3], sys.argv[3:5])
assert "torch" not in sys.modules
"""

RESHARD = """
import torch
from megagrid.checkpoint import Entry
from megagrid.checkpoint.reshard import reshard
from megagrid.nn.layout import Box

def work(a, out):
    source = open_checkpoint(a)
    ranks = [
        [
            Entry(name, tensor.shape, box, torch.empty(box.sizes, device="meta"), True)
            for name, tensor in source.manifest.tensors.items()
            for box in [Box((0, column), (tensor.shape[0], 256))]
        ]
        for column in (0, 256)
    ]
    reshard(source, Path(out), ranks, config="")

report(work, sys.argv[1:3], sys.argv[3:5])
"""


def save_rows(folder: Path, tensors: int, cuts: int) -> Path:
    """`tensors` of 1 MiB, each in `cuts` boxes of some rows."""
    values = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    rows = ROWS // cuts
    boxes = [
        Entry(
            f"layers.{number}.weight",
            (ROWS, COLUMNS),
            Box((cut * rows, 0), (rows, COLUMNS)),
            values[cut * rows : (cut + 1) * rows],
            True,
        )
        for number in range(tensors)
        for cut in range(cuts)
    ]
    return save(folder, boxes, {"step": 1})


def measured(program: str, *arguments: object) -> tuple[int, int]:
    """How far memory grew: by the work, and by 64 MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE + program, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    work, control = map(int, ran.stdout.split())
    return work, control


def test_a_diff_holds_slabs_and_no_torch(tmp_path: Path) -> None:
    small, large = save_rows(tmp_path / "1", 1, 2), save_rows(tmp_path / "2", TENSORS, 2)
    other = save_rows(tmp_path / "3", TENSORS, 4)
    grown, control = measured(DIFF, small, small, large, other)
    assert control > 60 * MIB
    assert grown < 8 * LARGEST < TENSORS * LARGEST / 4


def test_a_reshard_holds_boxes(tmp_path: Path) -> None:
    small, large = save_rows(tmp_path / "1", 1, 2), save_rows(tmp_path / "2", TENSORS, 2)
    grown, control = measured(RESHARD, small, tmp_path / "a", large, tmp_path / "b")
    assert control > 60 * MIB
    # Verifying reads chunks, one while the one before it is still there.
    assert grown < 2 * CHUNK + 8 * LARGEST < TENSORS * LARGEST / 2
