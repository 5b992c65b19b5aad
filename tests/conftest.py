"""What all tests share: the pool of ranks, and which tests this machine can run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything imports torch: several ranks share few cores, and threads that spin for each
# other make a test ten times slower. Child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to eight processes that run functions together; see tests/ranks.py."""
    with Ranks(limit=8) as pool:
        yield pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `heavy` tests unless asked for by `-m`, `gpu` tests where there is no accelerator."""
    asked_for = config.getoption("markexpr") or ""
    heavy = pytest.mark.skip(reason="takes minutes or gigabytes: ./tests/run.sh -m heavy")
    gpu = pytest.mark.skip(reason="needs an accelerator: ./tests/run.sh -m gpu on such a machine")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        if item.get_closest_marker("heavy") and "heavy" not in asked_for:
            item.add_marker(heavy)
    if marked and not _accelerator():
        for item in marked:
            item.add_marker(gpu)


def _accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
