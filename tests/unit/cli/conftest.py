from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny

RECIPE = """\
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 2MB}}}}, max_steps: 1}}
model: {{name: {model}}}
data: {{path: {folder}/text.txt, max_length: 32, batch_size: 2, sample_prompt: the quick}}
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module's recipe, or one that is short, with a text, in a folder of its own that is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    written: str = getattr(request.module, "RECIPE", RECIPE)
    Path("tiny.yaml").write_text(written.format(model=model, folder=tmp_path))
    return "tiny.yaml"
