"""The notebooks on the device of --device; on the fake GPU with a small model, and little to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs import notebooks
from tests.gpu.loops.bench import LOOPS
from tests.gpu.target import Target
from tests.support import tiny

pytestmark = [*LOOPS, pytest.mark.only("cuda", "fake")]

FEW = {
    "(12, 6)": "(3, 2)",
    "(8, 256)": "(2, 64)",
    "(4, 3, 2)": "(1.7,)",  # most of the memory is CUDA's context there
    "takes // share": "int(takes / share)",
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_the_same_bits(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not target.real:
        folder = tiny.model(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=12)
        for loader in (AutoModelForCausalLM, AutoTokenizer):
            load = loader.from_pretrained
            monkeypatch.setattr(loader, "from_pretrained", lambda *_, load=load, **__: load(folder))
    names = notebooks.run("same-bits", {} if target.real else FEW)
    assert names["equal"]
    assert all(names["equal"].values())
    assert names["peak"] <= names["budget"]
    assert {span.lane for span in names["trace"].spans} >= {"compute", "h2d"}
