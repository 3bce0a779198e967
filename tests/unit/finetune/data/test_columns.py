"""The format that columns speak for, and names that are mapped."""

from __future__ import annotations

from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.columns import check_columns, find_columns
from lt_offload.finetune.data.sources import Source

PLACES = "data.path='rows.json'"


@pytest.mark.parametrize(
    ("names", "choice", "mapping", "format", "columns"),
    [
        ("text n", "auto", {}, "text", {"text": "text"}),
        ("instruction input output", "auto", {}, "alpaca", None),
        ("instruction output system history", "auto", {}, "alpaca", None),
        ("messages tools system", "auto", {}, "chat", None),
        ("conversations tools", "auto", {}, "chat", {"messages": "conversations", "tools": "tools"}),
        ("prompt completion", "auto", {}, "completion", None),
        ("prompt messages text", "auto", {}, "chat", {"messages": "messages"}),
        ("prompt messages text", "text", {}, "text", {"text": "text"}),
        ("instruction output", "auto", {"text": "output"}, "text", {"text": "output"}),
        ("question answer", "auto", {"prompt": "question", "completion": "answer"}, "completion", None),
        ("question answer", "auto", {"instruction": "question", "output": "answer"}, "alpaca", None),
        ("dialogue text", "auto", {"messages": "dialogue"}, "chat", {"messages": "dialogue"}),
        ("conversations", "auto", {"role": "speaker", "content": "says"}, "chat", {"messages": "conversations"}),
        ("chosen rejected", "chat", {"messages": "chosen"}, "chat", {"messages": "chosen"}),
    ],
)
def test_formats(names: str, choice: Any, mapping: dict[str, str], format: str, columns: dict[str, str] | None) -> None:
    check_columns(mapping)
    found = find_columns(choice, mapping, names.split(), dict.fromkeys(names.split()), PLACES)
    assert found.format == format
    assert found.keys == {role: name for role, name in mapping.items() if role in ("role", "content")}
    assert set(mapping.items()) - set(found.keys.items()) <= set(found.columns.items())
    assert columns is None or found.columns == columns
    if columns is None and not mapping:
        assert list(found.columns) == sorted(names.split(), key=list(found.columns).index)


@pytest.mark.parametrize(
    ("names", "choice", "mapping", "message"),
    [
        ("body n", "auto", {}, r"no columns of a known format, it has 'body', 'n'; .* --data.columns '{text: body}'"),
        ("id Question answer", "auto", {}, "--data.columns '{instruction: Question, output: answer}'"),
        ("", "auto", {}, "it has none"),
        ("body", "text", {}, r"has no column 'text', it has 'body'; choose data.format=auto, or .* '{text: body}'"),
        ("text", "auto", {"text": "txet"}, "data.columns: .* has no column 'txet', it has 'text'"),
        ("text body", "text", {"text": "text", "prompt": "body"}, "data.format=text has no role 'prompt', it has text"),
        (
            "prompt chosen rejected",
            "auto",
            {},
            r"holds preferences \\(columns chosen and rejected\\).*completion: chosen",
        ),
        ("text chosen rejected", "chat", {}, "holds preferences"),
        (
            "prompt rejected_response chosen_response",
            "preference",
            {},
            "no column 'chosen' and no column 'rejected', it has 'prompt', .*; name the columns with --data.columns "
            "'{chosen: chosen_response, rejected: rejected_response}'",
        ),
        (
            "prompt chosen worse",
            "preference",
            {},
            "no column 'rejected', .*; name the column with .* '{rejected: worse}'",
        ),
    ],
)
def test_columns_that_are_of_no_format(names: str, choice: Any, mapping: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("\\\\", "\\")):
        find_columns(choice, mapping, names.split(), {}, PLACES)


def test_labels_of_completions_are_preferences() -> None:
    names = ["prompt", "completion", "label"]
    with pytest.raises(ConfigError, match=r"holds preferences \(columns label\)"):
        find_columns("auto", {}, names, {"label": True}, PLACES)
    assert find_columns("auto", {}, names, {"label": "spam"}, PLACES).format == "completion"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"txt": "body"}, "unknown role 'txt'; did you mean text?"),
        ({"zzz": "body"}, "roles are messages, tools, system, instruction"),
        ({"prompt": "a", "completion": "a"}, "gives column 'a' two roles, prompt and completion"),
    ],
)
def test_maps_that_cannot_be(mapping: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_columns(mapping)
    assert message in str(caught.value)


def test_what_of_a_folder_was_taken_is_said() -> None:
    source = Source(path="some", setting="data.path", kind="json", note="in more; left out: README.md")
    with pytest.raises(ConfigError, match=r"data.path='some' \(in more; left out: README.md\) has no columns of"):
        find_columns("auto", {}, ["a"], {"a": 1}, source.said)
