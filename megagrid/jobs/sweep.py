"""The runs of a job array: one for each combination of values. Pure.

--array 'optimizer.lr=[1e-3,3e-4]' --array 'train.seed=[1,2]'

    run_dir/optimizer.lr=0.001,train.seed=1     run_dir/optimizer.lr=0.001,train.seed=2
    run_dir/optimizer.lr=0.0003,train.seed=1    run_dir/optimizer.lr=0.0003,train.seed=2
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence

from megagrid.config.dump import toml_value
from megagrid.errors import ConfigError

MOST_RUNS = 1000
"""SLURM takes no more in an array unless it is told to (MaxArraySize)."""


def combinations(arrays: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run; of no arrays, those of one run: none.

    Raises:
        ConfigError: an array is no list of values, or states a key that another one does.
    """
    values = dict(map(_values, arrays))
    if len(values) < len(arrays):
        raise ConfigError(f"--array states a key twice: {' '.join(arrays)}; give one list for each")
    runs = list(itertools.product(*values.values()))
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"--array makes {len(runs)} runs; choose at most {MOST_RUNS}")
    return runs


def folder_name(overrides: Sequence[str]) -> str:
    """A name for the folder of a run with these overrides."""
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(overrides)).strip("_")


def _values(array: str) -> tuple[str, list[str]]:
    """`section.key=[a,b]` as the key and its overrides."""
    key, _, text = array.partition("=")
    values = _parsed(text.strip())
    if not values:
        raise ConfigError(
            f"--array {array} must be a key with a list of values, such as "
            "'optimizer.lr=[1e-3,3e-4]'"
        )
    if "logging.run_dir" in key:
        raise ConfigError("--array gives each run a folder in logging.run_dir; state another key")
    overrides = [f"{key.strip()}={value}" for value in values]
    if len(set(overrides)) < len(overrides):
        raise ConfigError(f"--array {array} has a value twice; each run needs another")
    return key, overrides


def _parsed(text: str) -> list[str]:
    """The values of a list as overrides have them."""
    if not (text.startswith("[") and text.endswith("]")):
        return []
    try:
        return [toml_value(value) for value in tomllib.loads(f"value = {text}")["value"]]
    except tomllib.TOMLDecodeError:
        # A shell takes the quotes out of ["adamw","sgd"].
        return [value for item in text[1:-1].split(",") if (value := item.strip())]
