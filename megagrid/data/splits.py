"""The data of a run: what it trains on and what it is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrid.data.dataset import SampleSource
from megagrid.data.synthetic import SyntheticDataset
from megagrid.errors import DataError

SYNTHETIC = "synthetic"
SYNTHETIC_VALID_SAMPLES = 64


@dataclass(frozen=True)
class DataSplits:
    """Training samples, held-out samples (None: nothing is held out), and the tokenizer behind them."""

    train: SampleSource
    valid: SampleSource | None
    vocab_size: int
    tokenizer_path: Path | None = None


def build(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    seq_length: int,
    seed: int,
    valid_fraction: float,
    repeat: bool,
    cache_dir: str | None,
    vocab_size: int,
) -> DataSplits:
    """Opens what ``[data]`` names; every rank does so on its own.

    ``vocab_size``: of the model; data with an id beyond it is refused here, before the first step.
    Errors: DataError for missing, damaged, mismatched or too small data.
    """
    if list(paths) == [SYNTHETIC]:
        valid = SyntheticDataset(
            vocab_size, seq_length, seed, "valid", SYNTHETIC_VALID_SAMPLES, repeat=False
        )
        return DataSplits(
            SyntheticDataset(vocab_size, seq_length, seed),
            valid if valid_fraction else None,
            vocab_size,
        )
    raise DataError(f"data.paths={list(paths)}: token files can't be read yet")
