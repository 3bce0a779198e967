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
    mark: str = ""

    def get_closest_marker(self, name: str) -> object:
        return self if name == self.mark else None


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


def test_a_row_of_few_of_the_slow_tests_of_a_folder_and_none_of_the_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FULL", False)
    slow = ("a", 2 * sampling.SLOW, "slow"), ("b", 2, "slow")
    marked: list[Any] = [
        Row(sampling.HERE / f"{place}/test_{file}.py", f"{place}::{file}[{row}]", mark)
        for place, files, mark in (*slow, ("b", 9, "long"), ("c", 1, "long"))
        for file in range(files)
        for row in range(3)
    ]
    others = rows("a/test_x.py", "other", 5)
    *chosen, one, two, three, four, five = sampling.without_slow([*marked, *others])
    assert [one, two, three, four, five] == others
    assert [item.nodeid.partition("::")[0] for item in chosen] == ["a", "a", "b"]
    assert {item.mark for item in chosen} == {"slow"}
    monkeypatch.setattr(sampling, "FULL", True)
    assert sampling.without_slow([*marked, *others]) == [*marked, *others]


def test_one_row_is_run_where_it_is_asked_for() -> None:
    asked = rows("a/test_x.py", "one", 12)[5:6]
    assert sampling.of_tests(asked, {"a": 3}) == asked
