"""From text to batches: tokenizers, token files, shuffling, blending, loading. No torch in here."""

from megagrid.data.batches import IGNORE, Batch, Loader
from megagrid.data.dataset import SampleSource
from megagrid.data.sampler import Sampler
from megagrid.data.splits import DataSplits, build
from megagrid.data.synthetic import SyntheticDataset

__all__ = [
    "IGNORE",
    "Batch",
    "DataSplits",
    "Loader",
    "SampleSource",
    "Sampler",
    "SyntheticDataset",
    "build",
]
