from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from tests.support import tiny


class CurrentStderr:
    """Whatever ``sys.stderr`` is when something is written."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@pytest.fixture(autouse=True)
def _lightning_writes_where_pytest_looks() -> None:
    """Lightning's logger keeps the stderr of the test in which it was first imported, which is closed by now."""
    for handler in logging.getLogger("lightning").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = CurrentStderr()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))
