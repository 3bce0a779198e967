"""Published tables: what they say of where they are from, and that today's planner plans what they show."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts import common
from scripts.docs import fits
from scripts.planning import NO_LIMIT_S
from scripts.recipes import headers
from tests import sampling

OFF = 0.03
"""By so much may a published figure differ from today's."""
SOON_S = 20.0
"""Rows that took longer of the processor are not planned again."""


class Row(NamedTuple):
    """A row of a table, and what makes it again, however busy the machine is."""

    name: str
    published: dict[str, Any]
    again: Callable[[], dict[str, Any] | None]


def of_recipes() -> Iterator[Row]:
    for name, figure in common.read_json(common.RESULTS / "recipes.json")["figures"].items():
        yield Row(name, figure, partial(headers.planned, name, NO_LIMIT_S))


def of_fits() -> Iterator[Row]:
    for path in sorted(common.RESULTS.glob("fits-*.json")):
        for row in common.read_json(path)["figures"]["cases"]:
            what = (row["model"], row["way"], row["card"])
            yield Row(", ".join(what), row, partial(fits.case, *what, NO_LIMIT_S))


TABLES = (of_recipes(), of_fits())


def drawn() -> list[Row]:
    """Return one row, two of each table with ``--every-row``, of those that are planned soon."""
    tables = [[row for row in table if row.published.get("plan_cpu_s", 0.0) <= SOON_S] for table in TABLES]
    assert all(tables)
    rows = [row for number, table in enumerate(tables) for row in sampling.some(table, 2, f"table {number}")]
    return rows if sampling.EVERY_ROW else sampling.some(rows, 1)


@pytest.mark.parametrize("row", drawn(), ids=lambda row: row.name)
def test_the_planner_of_today_plans_what_is_published(row: Row) -> None:
    today = row.again()
    assert today is not None
    before = row.published.get("iteration_s")
    assert today.get("iteration_s") == (before if before is None else pytest.approx(before, rel=OFF))
    assert today.get("reason") == row.published.get("reason")


def test_the_commit_says_whether_the_package_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "lt_offload").mkdir()
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    (tmp_path / "notes.txt").write_text("not planned with")
    clean = common.now()
    (tmp_path / "lt_offload" / "solve.py").write_text("x = 1\n")
    assert common.now()["commit"] == f"{clean['commit']}-dirty"
    assert common.when(clean) == f"{clean['date']} at commit {clean['commit']}"
