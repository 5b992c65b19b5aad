"""The comparison with one process, and what deviated most."""

from __future__ import annotations

import pytest

from tests.equivalence.case import Case
from tests.equivalence.compare import Equivalence
from tests.equivalence.tolerance import Deviation
from tests.ranks import Ranks

LARGEST = pytest.StashKey[dict[str, tuple[Deviation, Case]]]()


@pytest.fixture(scope="session")
def equivalence(ranks: Ranks, pytestconfig: pytest.Config) -> Equivalence:
    return Equivalence(ranks, pytestconfig.stash.setdefault(LARGEST, {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the largest deviation of each kind."""
    largest = config.stash.get(LARGEST, {})
    if largest:
        terminalreporter.section("largest deviations from one process")
        for deviation, case in largest.values():
            terminalreporter.write_line(
                f"{deviation.share:6.1%} of what is allowed: {deviation}, in {case}"
            )
