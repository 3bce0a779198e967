"""Rows without text: counted and named by file and row, before anything is tokenised."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.module import FineTuneData
from tests.support import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def made(tokenizer: str, path: Path, **settings: Any) -> FineTuneData:
    data = FineTuneData(tokenizer, path=str(path), **{"max_length": 8, "validation_share": 0.0} | settings)
    data.setup("fit")
    return data


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


GOOD = {"text": "a text of some length"}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({}, "text is missing"),
        ({"text": None}, "text is null"),
        ({"text": 3.5}, r"text is a number \(3.5\)"),
        ({"text": ["a"]}, "text is a list"),
        ({"text": {"a": "b"}}, "text is an object"),
        ({"text": True}, "text is true"),
        ({"text": "\ud800"}, "text is not Unicode text"),
    ],
)
def test_a_row_without_text(tokenizer: str, tmp_path: Path, row: object, what: str) -> None:
    path = lines(tmp_path / "rows.jsonl", GOOD, row, GOOD, row)
    with pytest.raises(
        ConfigError, match=rf"2 of 4 rows have no text to learn \(rows.jsonl row 2: {what}.*; rows.jsonl row 4"
    ):
        made(tokenizer, path)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"instruction": "say", "output": None}, "output is null"),
        ({"instruction": None, "output": "x"}, "instruction is null"),
        ({"instruction": "say", "output": "x", "input": 3}, "input is a number"),
    ],
)
def test_instructions(tokenizer: str, tmp_path: Path, row: object, what: str) -> None:
    good = {"instruction": "say", "output": "x", "input": None}
    (tmp_path / "rows.json").write_text(json.dumps([good, row]))
    with pytest.raises(ConfigError, match=f"1 of 2 rows have .*rows.json row 2: {what}"):
        made(tokenizer, tmp_path / "rows.json", format="alpaca", pack=False)


def test_the_file_of_a_folder_is_named(tokenizer: str, tmp_path: Path) -> None:
    for name, rows in {"a": [GOOD] * 3, "b": [GOOD, {"text": 1}]}.items():
        lines(tmp_path / f"{name}.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"1 of 5 rows have no text to learn \(b.jsonl row 2: text is a number"):
        made(tokenizer, tmp_path)


def test_tables_are_looked_through_too(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n1\n2\n")
    with pytest.raises(ConfigError, match=r"2 of 2 rows have no text to learn \(a.csv row 1: text is a number"):
        made(tokenizer, tmp_path / "a.csv")


def test_bad_rows_are_left_out_if_that_is_asked_for(
    tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean = made(tokenizer, lines(tmp_path / "clean.jsonl", GOOD, GOOD))
    with caplog.at_level(logging.WARNING):
        data = made(tokenizer, lines(tmp_path / "rows.jsonl", GOOD, {"text": None}, GOOD), skip_bad_rows=True)
    assert "1 of 3 rows have no text to learn (rows.jsonl row 2: text is null); they are left out" in caplog.text
    batches = [[batch["input_ids"].tolist() for batch in each.train_dataloader()] for each in (data, clean)]
    assert batches[0] == batches[1]
    with pytest.raises(ConfigError, match="leaves none"):
        made(tokenizer, lines(tmp_path / "all.jsonl", {"text": None}), skip_bad_rows=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "3", r"it holds a number \(3\) instead of rows"),
        ("a.json", "null", "it holds null instead of rows"),
        ("a.json", '["x"]', r"row 1 is a text \('x'\), not an object such as {\"text\": "),
        ("a.json", '[{"text": "a"}, 3]', "row 2 is a number"),
        ("a.json", "{}", "no column 'text', it has none"),
        ("a.jsonl", '{"text": "a"}\nbroken\n', "a.jsonl' cannot be read as json: line 2: "),
        ("a.json", "[" * 10**5, "nested too deeply"),
        ("a.jsonl", '{"text": "\xff', "cannot be read as json: line 1"),
        ("a.txt", "three short words", "a.txt has 18 tokens, which do not fill one sequence of data.max_length=32"),
    ],
)
def test_files_without_rows(tokenizer: str, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        made(tokenizer, tmp_path / name, max_length=32)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "ab"},\n {"text": "cd"}]',
        '[{"text": "ab"}, {"text": "cd"}]',
        '{"text": "ab"}\n\n{"text": "cd"}\r\n',
        '{\n"text": "ab\u2028"\n}',
    ],
)
def test_both_forms_under_both_endings(tokenizer: str, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert len(made(tokenizer, tmp_path / name, max_length=2).train_dataloader()) == 3


def test_when_all_is_held_out_that_is_said(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("three short words")
    data = made(tokenizer, tmp_path / "a.txt", max_length=16, validation_share=0.05)
    with pytest.raises(ConfigError, match="gives 0 training sequences .* or data.validation_share, which holds out 1"):
        data.train_dataloader()


def test_an_empty_response_teaches_nothing(tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"instruction": "say", "output": text} for text in ("yes", "", " \n")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with caplog.at_level(logging.WARNING):
        data = made(tokenizer, tmp_path / "rows.json", format="alpaca", pack=False, max_length=400)
    assert len(data.train_dataloader()) == 1
    assert "2 examples have nothing to learn and are left out" in caplog.text
