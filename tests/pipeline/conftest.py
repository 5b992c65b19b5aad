"""The comparison with one process, for schedules."""

from tests.equivalence.conftest import equivalence

__all__ = ["equivalence"]
