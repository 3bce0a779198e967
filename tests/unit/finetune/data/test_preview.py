"""What ``lt-finetune data`` shows: what is learned, how long rows are, what is cut."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.data.preview import Preview, pieces
from tests.unit.finetune.data.vocabularies import tokenizer as trained


def shown(data: FineTuneData, samples: int = 3, *, color: bool = False) -> str:
    paper = Console(file=io.StringIO(), width=80, highlight=False, markup=False, force_terminal=color)
    for part in Preview(data).parts(samples=samples, color=color):
        paper.print(part)
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [{"instruction": f"say [{n}]", "output": "yes" * n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"instruction": 3}])))
    return str(tmp_path / "rows.jsonl")


def test_plain_text(tokenizer: str, path: str) -> None:
    data = FineTuneData(tokenizer, path=path, pack=False, batch_size=4, max_length=60, skip_bad_rows=True)
    text = shown(data, 2)
    assert "<|user|>say [0]</s><|assistant|>\n" in text.replace("</s>\n", "\n"), "an empty answer is not learned"
    assert f"<|user|>say [19]</s><|assistant|>«{'yes' * 19}"[:80] in text.replace("\n", "")
    last = data.examples().documents()[19]
    assert f"rows.jsonl row 20: {len(last.ids)} tokens, 58 learned ──" in text
    assert "20rowsasalpaca(columnsinstruction,output);chattemplate:thetokenizer's;learned:" in "".join(text.split())
    assert "1 rows cannot be used and are left out" in text
    longer = [each for each in data.examples().documents() if len(each.ids) > 60]
    lost = sum(label != IGNORED for each in longer for label in each.labels[60:])
    assert f"data.max_length=60 cuts {len(longer)} rows, and loses {lost} tokens to learn" in text
    assert "1 rows have no answer or text to learn\n1 rows are left out: rows.jsonl row 1\n" in text
    assert "behind" not in text
    assert "19 sequences of up to 60 tokens in 5 batches of 4, the last one of 3, 11.8% of" in text
    assert max(map(len, text.splitlines())) <= 80
    assert shown(data, 0).startswith("───")


def test_answers_behind_the_longest_length_are_told_from_rows_without_one(tokenizer: str, path: str) -> None:
    text = shown(FineTuneData(tokenizer, path=path, pack=False, max_length=12, skip_bad_rows=True), 0)
    assert "19 rows have their whole answer behind data.max_length=12: raise it\n" in text
    assert "1 rows have no answer or text to learn\n20 rows are left out: rows.jsonl row 1, rows.jsonl row" in text


def test_colour(tokenizer: str, path: str) -> None:
    text = shown(FineTuneData(tokenizer, path=path, skip_bad_rows=True), 1, color=True)
    assert "«" not in text
    assert "\x1b[1;32mlike this\x1b[0m" in text
    assert "packed: " in text


@pytest.mark.parametrize("pack", [True, "wrapped"])
def test_streamed_text(tokenizer: str, tmp_path: Path, pack: Any) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "x" * n}) for n in range(1, 1200)))
    data = FineTuneData(
        tokenizer, path=str(tmp_path / "a.jsonl"), streaming=True, validation_rows=1, pack=pack, max_length=500
    )
    text = shown(data, 3)
    assert "a.jsonl row 1000: 1,001 tokens, 1,001 learned" in text
    assert "of the first 1,000 rows" in text
    assert ("a text goes on in another sequence" in text) == (pack is True)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_pieces_make_the_whole_text(kind: str) -> None:
    own = trained(kind, begins=True)
    ids = own("Yes, the answer is no</s>")["input_ids"]
    for cut in range(len(ids) + 1):
        example = Example(ids=ids, labels=[-100] * cut + ids[cut:])
        found = list(pieces(own, example))
        assert "".join(text for text, _, _ in found) == own.decode(ids)
        assert [text for text, _, special in found if special] == ["<s>", "</s>"]
