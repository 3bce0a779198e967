"""What the comparison with other packages finds out without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.finetune.data.chat.conversations import Conversation
from lt_offload.finetune.data.formats import IGNORED, Example
from scripts.agreement import __main__ as agreement
from scripts.agreement import makers, processes, trl
from scripts.agreement.rows import Comparison, Rows
from tests.parity.several.cases import LATE, MORE, PAIRS
from tests.parity.several.runs import RESUMED
from tests.unit.finetune.data.vocabularies import tokenizer


def written(tmp_path: Path, name: str, rows: list[dict[str, Any]], template: str | None) -> Rows:
    tokenizer("metaspace", begins=True).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return Rows.read(str(path), str(tmp_path / "tokenizer"), template, 100)


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


def test_differences_from_trl_are_told_apart(tmp_path: Path) -> None:
    says = [("user", "yes"), ("assistant", ""), ("user", "no"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in says]
    rows = written(tmp_path, "chat.jsonl", [{"messages": messages}], "chatml")
    [ours] = rows.examples
    place = next(number for number, label in enumerate(ours.labels) if label != IGNORED)
    ends = [number for number, token in enumerate(ours.ids) if token == rows.data.tokenizer.vocab["<|im_end|>"]]

    def why(number: int) -> list[str]:
        label = ours.ids[number] if ours.labels[number] == IGNORED else IGNORED
        labels = [*ours.labels[:number], label, *ours.labels[number + 1 :]]
        return trl._why(rows, 0, Example(ids=ours.ids, labels=labels), [])

    assert why(ends[1]) == [trl.EMPTY]
    assert why(place - 1) == [trl.MERGED]  # the line break before the answer
    assert why(place) == []
    assert why(1) == []
    assert trl._why(rows, 0, Example(ids=[*ours.ids, 1], labels=[*ours.labels, 1]), []) == []


def test_parts_that_are_written_in_another_way_are_not_joined() -> None:
    says = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    conversation = Conversation(messages=[{"role": role, "content": content} for role, content in says])
    whole = Example(ids=[1, 2, 3, 4], labels=[IGNORED, IGNORED, IGNORED, 4])
    part = Example(ids=[1, 2], labels=[IGNORED, 2])
    assert trl._joined(conversation, [part, whole], whole) == (Example(ids=[1, 2, 3, 4], labels=[-100, 2, -100, 4]), [])
    other = Example(ids=[9, 2], labels=[IGNORED, 2])
    assert trl._joined(conversation, [other, whole], whole) == (whole, [1])


def test_differences_from_an_encoder_are_told_apart(tmp_path: Path) -> None:
    says = [[("user", "yes"), ("assistant", answer)] for answer in ("no ", "</s>", "no")]
    talks = [[{"role": role, "content": content} for role, content in each] for each in says]
    rows = written(tmp_path, "chat.jsonl", [{"messages": messages} for messages in talks], "mistral")

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        cut = [message | {"content": message["content"].rstrip(" ")} for message in messages]
        return rows.data.encode_conversation(cut, add_generation_prompt=False)

    why = [makers._why(rows, encode, ours, each) for ours, each in zip(rows.examples, talks, strict=True)]
    assert why == [[makers.ENDS], [makers.MARKS], []]
    assert makers._why(rows, lambda messages: None, rows.examples[0], talks[0]) == []
    assert makers._why(rows, lambda messages: None, rows.examples[0], talks[0][:1]) == [makers.REFUSED]


def test_the_table_of_processes_says_what_differs_and_what_was_not_compared() -> None:
    row = {"case": "LoRA", "processes": 4, "one": 0.0, "stock": 1.19e-07}
    assert processes.line(row) == ["LoRA", "4", "equal", "1.2e-07"]
    assert processes.line(row | {"machines": 2})[1] == "4 on 2 machines"
    assert processes.line(row | {"one": None}) == ["LoRA", "4", "not comparable", "1.2e-07"]
    del row["stock"]
    assert processes.line(row) == ["LoRA", "4", "equal", ""]
    known = {(2, 1): PAIRS | {LATE: PAIRS["tight"]}, **MORE}
    assert all(set(names.values()) <= known[count].keys() for count, names in processes.ENGINES.items())
    assert {name for _, name, *_ in processes.RUNS} == {"2", "2 on 2", "unfrozen", *RESUMED}


def test_what_a_process_lost_is_not_equal(tmp_path: Path) -> None:
    found = {"weights": {"w": torch.ones(2)}, "states": {0: {"step": torch.tensor(3.0)}}, "steps": 4, "validation": []}
    assert processes._of_run(found, found, "validation") == 0
    assert processes._of_run(found, found | {"weights": {"w": torch.tensor([1.0, 1.5])}}) == 0.5
    assert processes._of_run(found, found | {"states": {}}) is None
