"""Rows that cannot be used: counted and named by file and row, before anything is trained."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.data.sequences import Documents


def made(tokenizer: str, path: Path | str, **settings: Any) -> Documents:
    return FineTuneData(tokenizer, path=str(path), **settings).examples().documents()


def texts(tokenizer: str, path: Path | str, **settings: Any) -> list[str]:
    data = FineTuneData(tokenizer, path=str(path), **settings)
    return [data.tokenizer.decode(each.ids).removesuffix("</s>") for each in data.examples().documents()]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


GOOD = {"text": "a text"}
HI, HEY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hey"}
CALL = {"name": "add", "arguments": {"a": 1}}


def chat(*messages: object, **more: object) -> dict[str, object]:
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(
    ("good", "row", "what"),
    [
        (GOOD, {}, "text is missing"),
        (GOOD, {"text": None}, "text is null"),
        (GOOD, {"text": 3.5}, "text is a number (3.5), not a text"),
        (GOOD, {"text": ["a"]}, "text is a list"),
        (GOOD, {"text": {"a": "b"}}, "text is an object"),
        (GOOD, {"text": True}, "text is true"),
        (GOOD, {"text": "\ud800"}, "text is not Unicode text: it has half of a surrogate pair"),
        (GOOD, [1], "is a list, not an object"),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}, "output is null"),
        ({"instruction": "a", "output": "b"}, {"output": "b"}, "instruction is missing"),
        ({"instruction": "a", "output": "b", "input": ""}, {"instruction": "a", "output": "b", "input": 3}, "input is"),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": 2},
            "completion is a number (2), not a text",
        ),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a"}, "completion is missing"),
        (chat(HI, HEY), chat(), "messages is empty"),
        (chat(HI, HEY), {"messages": None}, "messages is null, not a list of messages"),
        (chat(HI, HEY), {"messages": "hi"}, "messages is no JSON: "),
        (chat(HI, HEY), chat(HI), "messages has no message of the assistant, so there is nothing to learn"),
        (chat(HI, HEY), chat(HI, "hey"), "messages: message 2: is a text ('hey'), not an object with role and content"),
        (chat(HI, HEY), chat({"role": "judge", "content": ""}), "message 1: unknown role 'judge'; known are system"),
        (chat(HI, HEY), chat(HI, HEY | {"content": None}), "message 2: (role 'assistant') content is null"),
        (chat(HI, HEY), chat(HI, HEY | {"content": 4}), "message 2: (role 'assistant') content is a number"),
        (chat(HI, HEY), chat({"content": "x"}), "message 1: has no 'role', it has 'content'"),
        (chat(HI, HEY), chat(HI, HEY | {"weight": 3}), "message 2: weight is 3; it must be 0 or 1"),
        (
            chat(HI, HEY),
            chat(HI | {"content": [{"type": "image_url"}]}, HEY),
            "message 1: (role 'user') content has a part that is not text (image_url); only text is learned",
        ),
        (
            chat(HI, HEY),
            chat(HI | {"tool_calls": [CALL]}, HEY),
            "(role 'user') has tool_calls, which only the assistant",
        ),
        (chat(HI, HEY), chat(HI, HEY | {"tool_calls": CALL}), "message 2: tool_calls is an object, not a list"),
        (
            chat(HI, HEY),
            chat(HI, HEY | {"tool_calls": [{"id": "x"}]}),
            "message 2: tool_calls: a call has no name of a",
        ),
        (
            chat(HI, HEY),
            chat(HI, HEY | {"tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}),
            "message 2: tool_calls: arguments of add is no JSON: ",
        ),
        (chat(HI, HEY), chat(HI, {"from": "function_call", "value": "add"}), "(role 'function_call') value is no JSON"),
        (chat(HI, HEY, tools="[]"), chat(HI, HEY, tools="[{}"), "tools is no JSON"),
        (chat(HI, HEY, tools="[]"), chat(HI, HEY, tools=[{"x": 1}]), "tools has an entry that is no function with a"),
        (chat(HI, HEY, tools="[]"), chat(HI, HEY, tools=7), "tools is a number (7), not a list of functions"),
        (
            chat(HI, HEY, system=""),
            chat({"role": "system", "content": "s"}, HI, HEY, system="t"),
            "there are two system messages, in system and in messages",
        ),
    ],
)
def test_a_row_that_cannot_be_used(tokenizer: str, tmp_path: Path, good: object, row: object, what: str) -> None:
    path = lines(tmp_path / "rows.jsonl", good, row, good, row)
    with pytest.raises(ConfigError) as caught:
        made(tokenizer, path)
    assert "2 of 4 rows cannot be used (rows.jsonl row 2: " in str(caught.value)
    assert what in str(caught.value)
    assert "; rows.jsonl row 4: " in str(caught.value)
    assert "set data.skip_bad_rows=true to train without them" in str(caught.value)
    assert len(made(tokenizer, path, skip_bad_rows=True)) == 2


def test_roles_have_many_words_in_any_case(tokenizer: str, tmp_path: Path) -> None:
    def rows(user: str, assistant: str) -> dict[str, object]:
        return chat(HI | {"role": user}, HEY | {"role": assistant})

    words = [("User", "Bot"), ("HUMAN", "Chatbot"), ("prompter", "AI"), ("user", "bing"), ("Human", "GPT")]
    examples = made(tokenizer, lines(tmp_path / "a.jsonl", rows("user", "assistant"), *(rows(*pair) for pair in words)))
    assert len(examples) == 6
    assert all(each == examples[0] for each in examples)
    calls = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "ipython", "content": "1"}]
    path = lines(tmp_path / "b.jsonl", chat(HI, *calls, HEY), chat(HI, calls[0], calls[1] | {"role": "tool"}, HEY))
    assert made(tokenizer, path)[0] == made(tokenizer, path)[1]


@pytest.mark.parametrize(
    ("role", "content", "what"),
    [
        ("speaker", "says", "message 1: has no 'role', it has 'speaker', 'says'"),
        ("role", "text", "message 1: has no 'content', it has 'role', 'text'"),
    ],
)
def test_other_keys_of_messages_are_to_be_named(
    tokenizer: str, tmp_path: Path, role: str, content: str, what: str
) -> None:
    turns = [{role: who, content: words} for who, words in (("User", "hi"), ("bot", "a long answer"))]
    path = lines(tmp_path / "rows.jsonl", {"messages": turns})
    with pytest.raises(ConfigError) as caught:
        made(tokenizer, path)
    assert f"{what}; name its keys with --data.columns '{{role: KEY, content: KEY}}'" in str(caught.value)
    assert len(made(tokenizer, path, columns={"role": role, "content": content})) == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("broken", "is no JSON: Expecting value"),
        ('{"text": "a", "n": 1, "text": "b"}', "has the key 'text' twice"),
        ('{"text": "a", "meta": {"n": 1, "n": 2}}', "has the key 'n' twice"),
        ("[" * 10**5, "is nested too deeply"),
        ('{"text": "a"} {"text": "b"}', "is no JSON: Extra data"),
        (b'{"text": "caf\xe9"}', "is not UTF-8 text: byte 0xe9 at offset 29 (line 3); data must be UTF-8"),
    ],
)
def test_a_line_that_is_no_row(tokenizer: str, tmp_path: Path, line: str | bytes, what: str) -> None:
    content = line.encode() if isinstance(line, str) else line
    for name in ("rows.jsonl", "rows.json"):  # one object per line under both endings
        (tmp_path / name).write_bytes(b'{"text": "ab"}\n' + b"\n" + content + b'\n{"text": "cd"}\r\n')
        with pytest.raises(ConfigError) as caught:
            made(tokenizer, tmp_path / name)
        assert f"1 of 3 rows cannot be used ({name} row 2: {what}" in str(caught.value)
        assert texts(tokenizer, tmp_path / name, skip_bad_rows=True) == ["ab", "cd"]


def test_a_list_with_an_object_that_has_a_key_twice(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b", "text": "c"}, 3]')
    with pytest.raises(
        ConfigError, match=r"2 of 3 rows .*a.json row 2: has the key 'text' twice; a.json row 3: is a nu"
    ):
        made(tokenizer, tmp_path / "a.json")


def test_the_file_of_a_folder_is_named(tokenizer: str, tmp_path: Path) -> None:
    for name, rows in {"a": [GOOD] * 3, "b": [GOOD, {"text": 1}]}.items():
        lines(tmp_path / f"{name}.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"1 of 5 rows cannot be used \(b.jsonl row 2: text is a number"):
        made(tokenizer, tmp_path)
    assert made(tokenizer, tmp_path, skip_bad_rows=True)[3].place == "b.jsonl row 1"


def test_bad_rows_are_left_out_if_that_is_asked_for(
    tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "rows.jsonl", GOOD, {"text": None}, GOOD)
    for _ in range(2):  # made, and read from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            examples = made(tokenizer, path, skip_bad_rows=True)
        assert "1 of 3 rows cannot be used (rows.jsonl row 2: text is null, not a text); they are left" in caplog.text
        assert (len(examples), examples.bad) == (2, 1)
        assert examples[1].place == "rows.jsonl row 3"
    with pytest.raises(ConfigError, match="leaves none"):
        made(tokenizer, lines(tmp_path / "all.jsonl", {"text": None}), skip_bad_rows=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "is empty; it needs at least one row"),
        ("a.json", "[]", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.txt", " \n", "has no rows"),
        ("a.json", "3", "it holds a number (3) instead of rows"),
        ("a.json", "null", "it holds null instead of rows"),
        ("a.json", '["x"]', "has no rows that can be read (a.json row 1 is a text ('x'), not an object)"),
        ("a.json", "{}", "has no columns of a known format, it has none"),
        (
            "a.json",
            '[{"text": "a"},\n {"text": b}]',
            "cannot be read as json: Expecting value: line 2 column 11",
        ),
        ("a.json", '[{"text": "a"} {"text": "b"}]', "Expecting ',' delimiter: line 1 column 16"),
        ("a.json", '[{"text": "a"}] x', "Extra data: line 1 column 17"),
        ("a.json", '[{"text": "a"}', "Expecting ',' delimiter: line 1 column 15"),
        ("a.json", "[" * 10**5, "nested too deeply"),
        ("a.json", '{"text": ["a", "b"], "n": [1]}', "has columns of different lengths ('text' 2, 'n' 1)"),
        ("a.json", '{"text": ["a"], "text": ["b"]}', "has the key 'text' twice; rename or remove one"),
        ("a.jsonl", '{"text": "\xff', "no rows that can be read (a.jsonl row 1 is no JSON: Unterminated string"),
        ("a.json", b'[{"text": "caf\xe9"}]', "is not UTF-8 text: byte 0xe9 at offset 14 (line 1); data must be UTF-8"),
        ("a.txt", b"ab\n\xff", "is not UTF-8 text: byte 0xff at offset 3 (line 2)"),
        ("a.txt", b"\xff\xfea\x00", "byte 0xff at offset 0 (line 1); data must be UTF-8, it looks like UTF-16"),
        ("a.txt", b"caf\xc3", "is not UTF-8 text: byte 0xc3 at offset 3 (line 1)"),
        ("a.csv", b"text\ncaf\xe9\n", "is not UTF-8 text: byte 0xe9 at offset 8 (line 2)"),
        ("a.csv", "text,n,text\na,1,b\n", "has the column 'text' twice in its first line"),
        ("a.csv", "text,n\na,1\nb\n", "1 of 2 rows cannot be used (a.csv row 2: has 1 values, the first line has 2"),
        ("a.csv", 'text\n"a\n', "cannot be read as a table: line 2: unexpected end of data"),
        ("a.csv", "text\n", "has no rows"),
        ("a.jsonl.gz", b"no gzip", "is no complete gzip file: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 50, mtime=0)[:-12], "is no complete gzip file"),
        ("a.parquet", b"PAR", "cannot be read as parquet: "),
        ("a.arrow", b"ARR", "cannot be read as arrow: "),
    ],
)
def test_files_that_cannot_be_read(
    tokenizer: str, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        made(tokenizer, tmp_path / name)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert str(caught.value).startswith("data.path")
    assert str(caught.value).count("data.path") == 1


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.JSONL"])
@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "ab"},\n {"text": "cd\u2028"}]',
        '\ufeff[{"text": "ab"}, {"text": "cd\u2028"}]\n',
        '{"text": "ab"}\n\n{"text": "cd\u2028"}\r\n',
        '\n{"text": "ab"}\n{"text": "cd\\u2028"}',
    ],
)
def test_both_forms_under_both_endings(tokenizer: str, tmp_path: Path, name: str, content: str) -> None:
    packed = gzip.compress(content.encode()) if name.endswith("gz") else content.encode()
    (tmp_path / name).write_bytes(packed)
    assert texts(tokenizer, tmp_path / name) == ["ab", "cd\u2028"]


def test_objects_of_columns_and_single_objects(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "columns.json").write_text('{"text": ["ab", "cd"], "n": [1, null]}')
    assert texts(tokenizer, tmp_path / "columns.json") == ["ab", "cd"]
    (tmp_path / "one.json").write_text('{\n"text": "ab",\n"tags": ["x"]\n}')
    assert texts(tokenizer, tmp_path / "one.json") == ["ab"]
    (tmp_path / "chat.json").write_text(json.dumps(chat(HI, HEY), indent=1))
    assert texts(tokenizer, tmp_path / "chat.json") == ["<|user|>hi</s><|assistant|>hey"]


def test_a_list_of_rows_in_an_object(tokenizer: str, tmp_path: Path) -> None:
    rows = {"data": [{"text": "ab"}, {"text": "cd"}]}
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent))
        assert texts(tokenizer, tmp_path / "a.json") == ["ab", "cd"]
    (tmp_path / "b.json").write_text(json.dumps({"rows": [{"text": "ab"}, 3]}))
    with pytest.raises(ConfigError, match=r"b\.json row 2: is a number \(3\), not an object"):
        made(tokenizer, tmp_path / "b.json")
    (tmp_path / "c.json").write_text(json.dumps({"data": {"train": [{"text": "ab"}]}}))
    with pytest.raises(ConfigError, match=r"c\.json' has no columns of a known format, it has 'data'"):
        made(tokenizer, tmp_path / "c.json")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_with_other_delimiters(tokenizer: str, tmp_path: Path, delimiter: str) -> None:
    lines = (("n", "text"), ("1", "a, b"), ("2", f'"c{delimiter}d"'))
    (tmp_path / "a.csv").write_text("\n".join(map(delimiter.join, lines)))
    assert texts(tokenizer, tmp_path / "a.csv") == ["a, b", f"c{delimiter}d"]
    (tmp_path / "b.csv").write_text(f"text\na{delimiter}b\n")
    assert texts(tokenizer, tmp_path / "b.csv") == [f"a{delimiter}b"]


def test_every_value_of_a_table_is_text(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufefftext,n\r\n1,2\r\nNA,3\r\n"a, ""b""\nc",4\r\n')
    assert texts(tokenizer, tmp_path / "a.csv") == ["1", "NA", 'a, "b"\nc']
    (tmp_path / "a.tsv").write_text("n\ttext\n1\ta, b\n")
    assert texts(tokenizer, tmp_path / "a.tsv") == ["a, b"]


def test_odd_texts_stay_as_they_are(tokenizer: str, tmp_path: Path) -> None:
    odd = ["\0", "\u2028\x85", "😀\U0010ffff", "x" * 200_000, "\ud83d\ude00"]
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in odd))
    assert texts(tokenizer, path) == [*odd[:-1], "😀"]
