"""What the equivalence tests run: a tiny model, and a grid to train it on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from megagrid.config.schema import Config
from megagrid.grid.placement import Placement

Keys = tuple[tuple[str, Any], ...]
"""Recipe keys with their values: ("model.tied_embeddings", True)."""

GLOBAL_BATCH = 8
SIZES = (1, 2, 4)
LARGEST_WORLD = 8


@dataclass(frozen=True)
class Variant:
    """A model, and all else that the result of its training depends on.

    Attributes:
        family: "llama" or "gpt".
        precision: of the recipe.
        steps: optimizer steps of the run.
        ignored: samples of each eight whose labels are all ignored.
        keys: in which it differs from the tiny model of its family.
    """

    family: str
    precision: str = "fp32"
    steps: int = 8
    ignored: tuple[int, ...] = (5,)
    keys: Keys = ()

    def __str__(self) -> str:
        precision = [] if self.precision == "fp32" else [self.precision]
        return "-".join([self.family, *_words(self.keys), *precision])

    def having(self, *keys: tuple[str, Any]) -> Variant:
        """The same with more keys."""
        return replace(self, keys=(*self.keys, *keys))


@dataclass(frozen=True)
class Case:
    """A variant on a grid: the result must be that of the variant on one process.

    Attributes:
        micro_batch: samples of a microbatch.
        keys: of [parallel].
    """

    variant: Variant
    placement: Placement = field(default_factory=Placement)
    micro_batch: int = 2
    keys: Keys = ()

    def __str__(self) -> str:
        parts = [str(self.variant), shape(self.placement), f"micro{self.micro_batch}"]
        return "-".join([*parts, *_words(self.keys)])

    @property
    def config(self) -> Config:
        sections = _tiny(self.variant.family)
        placement = self.placement
        sections["parallel"] |= {
            "tensor_parallel_size": placement.tp,
            "pipeline_parallel_size": placement.pp,
            "context_parallel_size": placement.cp,
            "data_parallel_size": placement.dp,
        }
        sections["train"] |= {
            "steps": self.variant.steps,
            "precision": self.variant.precision,
            "micro_batch_size": self.micro_batch,
        }
        for key, value in (*self.variant.keys, *self.keys):
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        if self.variant.precision == "fp64":  # what roundings are measured by has no others
            sections["train"].pop("float8", None)
        return Config(**sections)


def _tiny(family: str) -> dict[str, dict[str, Any]]:
    """The sections of a recipe with a model of that family.

    61 is prime: no grid divides the vocabulary. Initial weights are about 1 / sqrt(hidden size):
    ten times smaller, attention would be all but uniform, and what depends on positions and heads
    would hardly show in a loss.
    """
    return {
        "model": {
            "family": family,
            "num_layers": 5,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": {"llama": 2, "gpt": 8}[family],
            "head_dim": 4,
            "vocab_size": 61,
            "max_seq_length": 32,
            "make_vocab_size_divisible_by": {"llama": 1, "gpt": 8}[family],
            "init_std": 0.15,
        },
        "parallel": {},
        "memory": {},
        "train": {"seq_length": 32, "global_batch_size": GLOBAL_BATCH, "device": "cpu"},
        "optimizer": {"lr": 1e-3},
        "data": {"paths": ["synthetic"]},
        "logging": {"run_dir": "unused"},
    }


def shape(placement: Placement) -> str:
    """A grid in a test's name."""
    cp = f"-cp{placement.cp}" if placement.cp > 1 else ""
    return f"tp{placement.tp}-pp{placement.pp}-dp{placement.dp}{cp}"


def _words(keys: Keys) -> list[str]:
    """Keys in a test's name: as short as they stay clear."""
    words = []
    for key, value in keys:
        name = key.partition(".")[2]
        if isinstance(value, str):
            words.append(value)
        elif value is True:
            words.append(name)
        else:
            words.append(f"{name}={value}".replace(" ", ""))
    return words


SP = ("parallel.sequence_parallel", True)
TIED = ("model.tied_embeddings", True)


def schedule(name: str) -> tuple[str, str]:
    """The key of a pipeline schedule."""
    return ("parallel.pipeline_schedule", name)


def exchange(name: str) -> tuple[str, str]:
    """The key of a way of context parallelism."""
    return ("parallel.context_parallel", name)


def strategy(name: str) -> tuple[str, str]:
    """The key of a sharding strategy."""
    return ("parallel.sharding_strategy", name)


LLAMA, GPT = Variant("llama"), Variant("gpt")

GRIDS = [
    Placement(tp=tp, pp=pp, dp=dp)
    for tp, pp, dp in product(SIZES, repeat=3)
    if 1 < tp * pp * dp <= LARGEST_WORLD
]
"""All grids of these sizes that eight ranks can form, except one process."""
