"""Models in Hugging Face's layout: to a checkpoint to train from, and from one.

megagrid convert from-hf models/Llama-3.2-1B start
megagrid convert to-hf runs/mine models/mine --dtype bf16
megagrid convert recipe models/Llama-3.2-1B > mine.toml
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megagrid.config.arguments import path_argument
from megagrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from megagrid.hf.files import Converted

DTYPES = ("fp32", "bf16", "fp16")

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subverbs."""
    verbs = parser.add_subparsers(dest="convert_verb", required=True, metavar="VERB")
    for name, (run_verb, text, arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        for argument in arguments:
            argument(verb)
        verb.set_defaults(convert_run=run_verb)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what was made; returns the exit code."""
    arguments.convert_run(arguments)
    return 0


def _from(arguments: argparse.Namespace) -> None:
    from megagrid.hf.incoming import RECIPE, from_hf

    made = from_hf(
        arguments.folder,
        arguments.checkpoint,
        ignored=arguments.ignore,
        max_shard_bytes=_bytes(arguments.max_shard_size),
    )
    _say(made, arguments.checkpoint)
    print(f"train it: megagrid train {arguments.checkpoint / RECIPE}")


def _to(arguments: argparse.Namespace) -> None:
    from megagrid.hf.outgoing import EXPORT_DTYPES, to_hf

    made = to_hf(
        arguments.checkpoint,
        arguments.folder,
        dtype=EXPORT_DTYPES[arguments.dtype] if arguments.dtype else None,
        max_shard_bytes=_bytes(arguments.max_shard_size),
    )
    _say(made, arguments.folder)


def _recipe(arguments: argparse.Namespace) -> None:
    from megagrid.hf.config import described
    from megagrid.hf.recipe import recipe_text

    model = described(arguments.folder).model
    sys.stdout.write(recipe_text(model, arguments.folder, arguments.folder.resolve().name))


def _say(made: Converted, target: Path) -> None:
    for line in made.passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    tokenizer = "its tokenizer" if made.tokenizer else "no tokenizer"
    files = "1 file" if made.files == 1 else f"{made.files} files"
    size = f"{made.nbytes / 1e6:,.1f} MB"
    print(f"{target}: {made.what}, {made.tensors} tensors of {size} in {files}, {tokenizer}")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]I?B|B)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text} isn't a size; write 5GB, 500MB or 2GiB")
    return size


# --- Arguments -----------------------------------------------------------------------------------


Argument = Callable[[argparse.ArgumentParser], None]


def _path(name: str, text: str) -> Argument:
    """The argument `name`, a folder; `text` is its help."""
    metavar = "DIR" if name == "folder" else name.upper()
    return lambda verb: verb.add_argument(name, type=path_argument, metavar=metavar, help=text)


_FOLDER = _path("folder", "config.json and safetensors files")
_NEW_FOLDER = _path("folder", "a new folder for transformers")
_CHECKPOINT = _path("checkpoint", "a checkpoint's folder, or a run's: its newest sound one")
_NEW_CHECKPOINT = _path("checkpoint", "a new folder; recipe.toml lies in it")


def _ignore(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="a key of config.json that isn't known, and doesn't change what the model computes",
    )


def _dtype(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dtype", choices=DTYPES, help="of the tensors; else as they are stored")


def _max_shard_size(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (5GB)"
    )


VERBS: dict[str, tuple[Callable[[argparse.Namespace], None], str, tuple[Argument, ...]]] = {
    "from-hf": (
        _from,
        "a checkpoint and a recipe from a Hugging Face folder",
        (_FOLDER, _NEW_CHECKPOINT, _ignore, _max_shard_size),
    ),
    "to-hf": (
        _to,
        "a Hugging Face folder from a checkpoint",
        (_CHECKPOINT, _NEW_FOLDER, _dtype, _max_shard_size),
    ),
    "recipe": (_recipe, "print a recipe that trains from a Hugging Face folder", (_FOLDER,)),
}
"""Verb -> (what it does, help, its arguments)."""
