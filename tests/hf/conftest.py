"""Folders that transformers has written, made once."""

from __future__ import annotations

import pytest

from tests.hf.models import Saved, saver


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a model by name; to be read, not written."""
    return saver(tmp_path_factory.mktemp("hf"))
