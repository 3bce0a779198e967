"""Which rows of the tests are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import sampling


@dataclass(frozen=True)
class Row:
    path: Path
    nodeid: str


def rows(place: str, name: str, count: int) -> list[Any]:
    made = [f"tests/{place}::{name}[{row}]" for row in range(count)] if count > 1 else [f"tests/{place}::{name}"]
    return [Row(sampling.HERE / place, nodeid) for nodeid in made]


def test_a_share_of_the_rows_of_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FULL", False)
    tests = [("a/test_x.py", "one", 12), ("a/b/test_x.py", "two", 12), ("c/test_x.py", "three", 12)]
    tests += [("a/test_x.py", "alone", 1), ("a/test_x.py", "few", 2)]
    items = [item for test in tests for item in rows(*test)]

    def found() -> list[int]:
        chosen = sampling.of_tests(items, {"a": 3, "a/b": 2})
        assert chosen == [item for item in items if item in chosen]
        return [sum(f"::{name}" in item.nodeid for item in chosen) for _, name, _ in tests]

    assert found() == [4, 6, 12, 1, 1]
    monkeypatch.setattr(sampling, "FULL", True)
    assert found() == [12, 12, 12, 1, 2]


def test_one_row_is_run_where_it_is_asked_for() -> None:
    asked = rows("a/test_x.py", "one", 12)[5:6]
    assert sampling.of_tests(asked, {"a": 3}) == asked


def test_half_of_the_tests_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FULL", False)
    items = [item for number in range(8) for item in rows("a/test_x.py", f"test{number}", 1 + number % 3)]
    others = rows("c/test_x.py", "other", 5)
    chosen = sampling.half([*items, *others], ["a"])
    assert [item for item in chosen if item in others] == others
    kept = {item.nodeid.partition("[")[0] for item in chosen if item not in others}
    assert len(kept) == 4
    assert [item for item in items if item in chosen] == [i for i in items if i.nodeid.partition("[")[0] in kept]
