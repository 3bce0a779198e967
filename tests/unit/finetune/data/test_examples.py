"""Tokenised rows: kept in a cache that notices every change, streamed, and made by several processes."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data import formats
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.data.sequences import Documents
from tests import sampling
from tests.support import tiny

ROWS = [{"instruction": f"say {n}", "input": "", "output": f"yes {n}"} for n in range(40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path / "rows.jsonl"


def made(tokenizer: str, path: Any, folder: Path | None = None, **settings: Any) -> Documents:
    where = {"cache_dir": str(folder)} if folder else {}
    given = path if isinstance(path, list) else str(path)
    return FineTuneData(tokenizer, path=given, **where, **settings).examples().documents()


def test_the_second_start_reads_what_the_first_has_made(
    tokenizer: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tokenizer, path, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(formats.Encoder, "encode", None)
        again = made(tokenizer, path, tmp_path / "cache", max_length=17, batch_size=3)
    assert list(again) == list(first) == [first[i] for i in range(40)] == first[:]
    assert again[39].place == "rows.jsonl row 40"
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 1
    assert [file["filename"] for file in again.dataset.cache_files], "it is read by memory map"


@pytest.mark.parametrize(
    "settings",
    [{"train_on": "all"}, {"system": "Be brief."}, {"template": "zephyr"}, {"columns": {"input": "output"}}],
)
def test_other_settings_are_other_tokens(tokenizer: str, path: Path, tmp_path: Path, settings: Any) -> None:
    settings = {"columns": {"output": "instruction", "instruction": "output"}} if "columns" in settings else settings
    before = made(tokenizer, path, tmp_path / "cache")
    after = made(tokenizer, path, tmp_path / "cache", **settings)
    assert list(after) != list(before)
    assert list(after) == list(made(tokenizer, path, tmp_path / "other", **settings))


def test_another_file_under_the_same_name_is_noticed(tokenizer: str, path: Path, tmp_path: Path) -> None:
    before = made(tokenizer, path, tmp_path / "cache")
    text = path.read_text()
    path.write_text(text.replace("yes 7", "yes 8"))
    os.utime(path, (1, 1))  # of the same size, at another time
    after = made(tokenizer, path, tmp_path / "cache")
    assert [i for i in range(40) if before[i] != after[i]] == [7]


def test_another_tokenizer_is_noticed(
    tokenizer: str, path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny.tokenizer(tmp_path_factory.mktemp("other"), chat=True)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    before = made(tokenizer, path, tmp_path / "cache")
    assert list(made(str(other), path, tmp_path / "cache")) != list(before)


@pytest.mark.parametrize("damage", ["cut", "removed", "a file"])
def test_a_cache_that_cannot_be_used_is_said(tokenizer: str, path: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    if damage == "a file":
        cache.write_text("")
    else:
        made(tokenizer, path, cache)
        [file] = cache.rglob("*.arrow")
        content = file.read_bytes()
        file.unlink()
        if damage == "cut":
            file.write_bytes(content[:-200])
    with pytest.raises(ConfigError, match=r"data.cache_dir='.*cache' cannot be used: .*; remove it, or name another"):
        made(tokenizer, path, cache)


def test_several_processes_make_the_same(tokenizer: str, path: Path, tmp_path: Path) -> None:
    expected = made(tokenizer, path, tmp_path / "one")
    several = made(tokenizer, path, tmp_path / "two", num_proc=2)
    assert list(several) == list(expected)
    assert list(made(tokenizer, path, tmp_path / "two", num_proc=2)) == list(expected)
    with pytest.raises(ConfigError, match=r"data.num_proc=0 is too small"):
        made(tokenizer, path, num_proc=0)


def test_several_processes_end_under_a_handler_of_sigterm(tokenizer: str, path: Path, tmp_path: Path) -> None:
    """As Lightning has one while it trains, which processes inherit."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        for turn in range(20 if sampling.EVERY_ROW else 4):
            assert len(made(tokenizer, path, tmp_path / str(turn), num_proc=2)) == len(ROWS)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_several_sources_one_after_the_other(tokenizer: str, path: Path, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("text\nplain\n")
    both = made(tokenizer, [str(tmp_path / "more.csv"), str(path)])
    assert len(both) == 41
    assert [both[0].place, both[1].place, both[40].place] == ["more.csv row 1", "rows.jsonl row 1", "rows.jsonl row 40"]
    assert both[1] == made(tokenizer, path)[0]
    with pytest.raises(IndexError):
        both[41]


def test_what_was_found_is_said_in_one_line(tokenizer: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            made(tokenizer, path)
        [line] = [record.getMessage() for record in caplog.records]
        assert line.endswith(
            "rows.jsonl': 40 rows as alpaca (columns instruction, output, input); chat template: the tokenizer's; "
            "learned: answers"
        )


def test_texts_are_told_how_they_become_conversations(
    tokenizer: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"prompt": "instruction", "completion": "output"}
    flag = "--data.columns '{instruction: instruction, output: output}'"
    bare = str(tiny.tokenizer(path.parent / "bare"))
    with caplog.at_level(logging.INFO):
        for each in (tokenizer, bare):
            made(each, path, columns=columns)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(f"; no chat template; learned: answers; to train by the model's chat template: {flag}")
    assert second.endswith("; no chat template; learned: answers")


def test_what_is_unusual_about_conversations_is_counted(
    tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = ["u:a b:c", "b:c", "s:x b:c u:d b:e", "u:a u:b b:c", "u:a b: u:c b:d", "u:a b:c b: u:d b:e"]
    roles = {"u": "user", "b": "assistant", "s": "system"}
    rows = [{"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in line.split(" ")]} for line in turns]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = {
        "a conversation begins with an answer, which nothing asks for": (2, 2),
        "two messages of one side follow each other": (2, 4),
        "one answer of several is empty": (2, 5),
    }

    def told() -> list[str]:
        warnings = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        caplog.clear()
        return [message.partition("': ")[2] for message in warnings]

    found = made(tokenizer, tmp_path / "rows.jsonl")
    assert told() == [f"{note} ({count} of 6 rows)" for note, (count, _) in said.items()]
    data = FineTuneData(tokenizer, path=str(tmp_path / "rows.jsonl"), streaming=True, validation_rows=0)
    stream = data.examples()
    assert list(stream) == list(found)
    assert told() == [f"{note} (rows.jsonl row {row})" for note, (_, row) in said.items()]


def test_streams_give_the_same(tokenizer: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = FineTuneData(tokenizer, path=str(path), streaming=True, validation_rows=0)
    stream = data.examples()
    assert list(data.examples("validation_path")) == []
    assert list(stream) == list(stream) == list(made(tokenizer, path))
    with path.open("a") as file:
        file.write('\n{"instruction": 3}\nbroken\n')
    with pytest.raises(ConfigError, match=r"a row cannot be used \(rows.jsonl row 41: instruction is a number"):
        list(stream)
    skipping = FineTuneData(tokenizer, path=str(path), streaming=True, validation_rows=0, skip_bad_rows=True).examples()
    with caplog.at_level(logging.WARNING):
        assert len(list(skipping)) == 40
    assert skipping.bad == 2
    assert "2 of 42 rows cannot be used (rows.jsonl row 41: instruction is a number" in caplog.text


def test_an_empty_stream(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    stream = FineTuneData(tokenizer, path=str(tmp_path / "a.jsonl"), streaming=True, validation_rows=0).examples()
    with pytest.raises(ConfigError, match="has no rows that can be read"):
        list(stream)


def test_rows_of_a_table_have_no_nulls_for_what_other_rows_have(tokenizer: str, tmp_path: Path) -> None:
    import datasets

    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "table")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert list(made(tokenizer, tmp_path / "table")) == list(made(tokenizer, tmp_path / "rows.json"))


def test_the_conversation_is_written_as_in_training(tokenizer: str, path: Path) -> None:
    data = FineTuneData(tokenizer, path=str(path), system="Be brief.")
    whole = data.examples().documents()[3]
    messages = [{"role": "user", "content": "say 3"}, {"role": "assistant", "content": "yes 3"}]
    assert data.encode_conversation(messages, add_generation_prompt=False) == whole.ids
    prompt = data.encode_conversation(messages[:1])
    assert whole.ids[: len(prompt)] == prompt
    assert data.tokenizer.decode(prompt) == "<|system|>Be brief.</s><|user|>say 3</s><|assistant|>"
    for text in ("say 3", messages[:1]):
        assert data.prompt(text)["input_ids"].tolist() == [prompt]
    assert data.prompt("say 3")["end"] == [data.tokenizer.eos_token_id]
    with pytest.raises(ConfigError, match="the conversation cannot be written: messages: message 1: unknown role 'x'"):
        data.encode_conversation([{"role": "x", "content": "a"}])
    listed = path.with_suffix(".json")
    listed.write_text(json.dumps(ROWS))
    assert FineTuneData(tokenizer, path=str(listed), system="Be brief.").prompt("say 3")["input_ids"].tolist() == [
        prompt
    ]
    listed.write_text(json.dumps([{"prompt": messages[:1], "completion": messages[1:]}]))
    for format in ("auto", "completion"):
        turns = FineTuneData(tokenizer, path=str(listed), format=format, system="Be brief.")
        assert turns.prompt("say 3")["input_ids"].tolist() == [prompt], format
    plain = FineTuneData(tokenizer, path=str(path), format="text")
    assert plain.tokenizer.decode(plain.prompt("say 3")["input_ids"][0]) == "say 3"
