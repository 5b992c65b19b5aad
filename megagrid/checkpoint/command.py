"""Look into checkpoints: what a run has, whether one is sound, what it holds. No ranks needed.

megagrid ckpt list runs/tiny
megagrid ckpt verify runs/tiny/checkpoints/step-00000100
megagrid ckpt inspect runs/tiny/checkpoints/step-00000100
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from megagrid.checkpoint.find import verify
from megagrid.checkpoint.folders import (
    ABANDONED,
    CHECKPOINTS,
    DELETED,
    PARTIAL,
    REPLACED,
    is_step_name,
)
from megagrid.checkpoint.layout import OPTIMIZER_PREFIX
from megagrid.checkpoint.load import load_trainer_state
from megagrid.checkpoint.manifest import Manifest, find_damage, read_manifest
from megagrid.checkpoint.save import TRAINER_STATE
from megagrid.errors import CheckpointError

STATES = {
    PARTIAL: "a save that didn't end, or hasn't yet",
    REPLACED: "replaced by a later save of this step",
    DELETED: "being removed",
    ABANDONED: "sizes are right; the run went on from an earlier step",
    "": "sizes are right",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subverbs, each of one path."""
    verbs = parser.add_subparsers(dest="ckpt_verb", required=True, metavar="VERB")
    for name, (run_verb, what, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("path", type=Path, metavar=what)
        verb.set_defaults(ckpt_run=run_verb)


def run(arguments: argparse.Namespace) -> int:
    """Print what the subverb says; returns the exit code."""
    print(arguments.ckpt_run(arguments.path))
    return 0


def list_checkpoints(run_folder: Path) -> str:
    """A line for each folder of checkpoints, newest first, with what its sizes say."""
    folder = run_folder / CHECKPOINTS if (run_folder / CHECKPOINTS).is_dir() else run_folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder} doesn't exist; name the folder of a run")
    paths = sorted((p for p in folder.iterdir() if is_step_name(p.name)), reverse=True)
    if not paths:
        raise CheckpointError(f"{folder} holds no checkpoint")
    return "\n".join(f"{path.name:<24}{_summary(path)}" for path in paths)


def _summary(checkpoint: Path) -> str:
    if checkpoint.suffix in (PARTIAL, DELETED):
        return f"{'':>12}   {STATES[checkpoint.suffix]}"
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return f"{'':>12}   not sound: {error}"
    problems = find_damage(checkpoint, manifest.files.items(), deep=False)
    state = f"not sound: {problems[0]}" if problems else STATES[checkpoint.suffix]
    return f"{_size(manifest):>12}   {state}"


def verify_checkpoint(checkpoint: Path) -> str:
    """Compare every file with its checksum.

    Raises:
        CheckpointError: that names the damaged files.
    """
    manifest = read_manifest(checkpoint)
    if problems := verify(checkpoint, manifest):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")
    return f"{checkpoint} is sound: {len(manifest.files)} files, {_size(manifest)}"


def inspect_checkpoint(checkpoint: Path) -> str:
    """Trainer state, then a line per weight: shape, dtype, and into how many boxes it is cut."""
    manifest = read_manifest(checkpoint)
    weights = {
        name: tensor
        for name, tensor in manifest.tensors.items()
        if not name.startswith(OPTIMIZER_PREFIX)
    }
    states = len(manifest.tensors) - len(weights)
    parameters = sum(math.prod(tensor.shape) for tensor in weights.values())
    lines = [
        f"step {manifest.step}, written by megagrid {manifest.version}",
        f"{len(manifest.files)} files, {_size(manifest)}",
        f"{len(weights)} weights of {parameters:,} parameters, {states} optimizer states",
    ]
    if TRAINER_STATE in manifest.files:
        state = load_trainer_state(checkpoint)
        lines += ["", *(f"{key:<24}{json.dumps(value)}" for key, value in state.items())]
    width = max(map(len, weights), default=0) + 2
    lines += [""] + [
        f"{name:<{width}}{tensor.dtype:<10}{' x '.join(map(str, tensor.shape)) or 'a number':<20}"
        f"{len(tensor.boxes)} box{'es' if len(tensor.boxes) != 1 else ''}"
        for name, tensor in weights.items()
    ]
    return "\n".join(lines)


def _size(manifest: Manifest) -> str:
    size = float(sum(file.size for file in manifest.files.values()))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


VERBS = {
    "list": (list_checkpoints, "RUN", "the checkpoints of a run, newest first"),
    "verify": (verify_checkpoint, "CHECKPOINT", "read every file and compare checksums"),
    "inspect": (inspect_checkpoint, "CHECKPOINT", "steps, sizes and tensors of a checkpoint"),
}
"""Verb -> (function of a path that returns what to print, the path's name, help)."""
