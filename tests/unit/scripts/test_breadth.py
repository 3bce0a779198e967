"""The table of the models that were tried."""

from __future__ import annotations

from scripts.breadth import tables

MADE = {"versions": {"transformers": "9.9"}, "settings": {"family": "masked"}}


def _row(name: str, *runs: tuple[str, str, str]) -> dict[str, object]:
    return {"name": name, "runs": [dict(zip(("budget", "outcome", "says"), run, strict=True)) for run in runs]}


def test_a_table_counts_what_plain_trains_and_says_what_is_refused() -> None:
    rows = [
        _row("one", ("smallest", "equal", ""), ("recomputing", "equal", "")),
        _row("two", ("smallest", "refused", "UnsupportedError: a | b"), ("recomputing", "equal", "")),
        _row("three", ("plain", "not run", "TypeError")),
    ]
    seen = []

    def section(*args: object) -> str:
        seen.append(args)
        return "THE TABLE"

    text = tables.table(section, [MADE | {"figures": {"rows": rows}}])
    ((title, command, _, _, lines),) = seen
    assert "transformers 9.9, masked" in str(title)
    assert command == "scripts.breadth --family masked"
    assert lines == [[tables.RUNS["smallest"], "1 of 2", "1 refused"], [tables.RUNS["recomputing"], "2 of 2", "none"]]
    assert text.startswith("THE TABLE")
    assert f"`two`: refused, {tables.RUNS['smallest']}: UnsupportedError: a \\| b" in text
    assert text.endswith("in such sizes either: `three`.")
