"""The command-line arguments that several verbs take: a recipe, a path."""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrid.config.load import load
from megagrid.config.schema import Config


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, such as recipes/gpt2.toml")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Keys of a recipe with other values."""
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="a key of the recipe with another value, such as optimizer.lr=1e-4",
    )


def load_recipe(arguments: argparse.Namespace) -> Config:
    """The config that `arguments` name; ConfigError where it can't be."""
    return load(arguments.recipe, arguments.overrides)


def path_argument(text: str) -> Path:
    """An argument that names a file or a folder. pathlib takes "" for the current folder, which
    nobody means by an empty variable of a shell."""
    if not text:
        raise argparse.ArgumentTypeError('"" names nothing; write . for the current folder')
    return Path(text)
