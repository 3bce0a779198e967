"""What the comparison with other packages finds out without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lt_offload.finetune.data.formats import IGNORED, Example
from scripts.agreement import __main__ as agreement
from scripts.agreement.rows import Comparison, Rows
from tests.unit.finetune.data.vocabularies import tokenizer


def test_rows_count_as_the_same_as_documented_or_as_neither() -> None:
    ours = Example(ids=[1, 2, 3], labels=[IGNORED, 2, 3])
    found = Comparison(file="f", tokenizer="t", against="TRL")
    found.add(1, ours, Example(ids=[1, 2, 3], labels=[IGNORED, 2, 3]), lambda: pytest.fail("nobody asks"))
    found.add(2, ours, Example(ids=[1, 2, 4], labels=[IGNORED, 2, 4]), lambda: ["a reason", "another"])
    found.add(3, ours, Example(ids=[1, 2, 3], labels=[1, 2, 3]), lambda: [])
    found.add(4, ours, None, lambda: ["a reason"])
    assert (found.rows, found.same, found.documented, found.undocumented) == (4, 1, {"a reason": 2, "another": 1}, 1)
    assert found.examples["a reason"] == "row 2: tokens from 2: [3] and [4], 3 and 3 tokens"
    assert found.examples["undocumented"] == "row 3: labels from 0: [-100, 2, 3] and [1, 2, 3], 3 and 3 tokens"
    shown = list(agreement.described(found))
    assert shown[-1].startswith("    1 rows: undocumented (row 3")


def test_hard_rows_can_be_read(tmp_path: Path) -> None:
    tokenizer("metaspace", begins=True).save_pretrained(tmp_path / "tokenizer")
    for file in agreement.EDGES:
        rows = Rows.read(file, str(tmp_path / "tokenizer"), "chatml", 1000)
        assert len(rows.rows) == len(Path(file).read_text().splitlines()) > 15
        assert [each is None for each in rows.conversations] == ["completion" in file] * len(rows.rows)
