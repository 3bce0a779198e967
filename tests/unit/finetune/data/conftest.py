from __future__ import annotations

import pytest

from tests.support import tiny


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tokenizer(tmp_path_factory.mktemp("tokenizer"), chat=True))
