"""The command-line arguments of every verb that works on a recipe."""

from __future__ import annotations

import argparse

from megagrid.config.load import load
from megagrid.config.schema import Config


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, such as recipes/gpt2.toml")
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
