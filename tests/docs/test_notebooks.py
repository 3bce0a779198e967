"""The notebooks run from top to bottom: here on the emulated device, in tests/gpu on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import notebooks


@pytest.mark.long
def test_the_same_bits_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = notebooks.run("same-bits")
    assert names["equal"]
    assert all(names["equal"].values())
    assert names["peak"] <= names["budget"]
    assert "the emulated device" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_no_outputs_are_kept(name: str) -> None:
    assert [cell for cell in notebooks.cells(name) if cell.get("outputs") or cell.get("execution_count")] == []
