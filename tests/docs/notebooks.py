"""Notebooks of the documentation as programs: their cells of code in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


def run(name: str, changes: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Run a notebook with ``changes`` of its text, but for the lines that install packages; return its variables."""
    texts = ["".join(cell["source"]) if cell["cell_type"] == "code" else "" for cell in cells(name)]
    for old, new in changes.items():
        assert sum(text.count(old) for text in texts) == 1, old
        texts = [text.replace(old, new) for text in texts]
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(texts):
        lines = [line for line in text.splitlines() if not line.startswith("%pip")]
        exec(compile("\n".join(lines), f"{name}, cell {number}", "exec"), names)
    return names
