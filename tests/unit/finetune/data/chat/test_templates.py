"""Chat templates by name: the tokenizer's, shipped ones and files; what they cannot write is written as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.conversations import Conversation
from lt_offload.finetune.data.templates import TOOLS_AS_TEXT, ChatTemplate, find_template
from tests.unit.finetune.data.chat.test_spans import CALLS, ENDED, SHIPPED
from tests.unit.finetune.data.vocabularies import tokenizer

CALLS_OF_TEXT = CALLS.replace("call.function | tojson", "call.function.name + call.function.arguments")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "sum"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3"},
]


def own(text: str) -> ChatTemplate:
    return ChatTemplate("own", text, {"bos_token": "<s>", "eos_token": "</s>"}, ())


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (CALLS, {"tools", "calls", "results"}),
        (CALLS_OF_TEXT, {"tools", "calls", "results"}),
        (ENDED, {"results"}),
        (ENDED.replace("+ m.content", "+ (m.content if m.role != 'tool' else '')"), set()),
    ],
)
def test_what_of_functions_a_template_writes(text: str, written: set[str]) -> None:
    user, call, result, answer = MESSAGES
    for what, made in {
        "tools": Conversation(messages=[user, answer], tools=TOOLS),
        "calls": Conversation(messages=[user, call]),
        "results": Conversation(messages=[user, answer, result, answer]),
    }.items():
        assert (own(text).fit(made)[1] is None) == (what in written)


def test_arguments_are_what_the_template_wants() -> None:
    made = Conversation(messages=MESSAGES, tools=TOOLS)
    assert own(CALLS).fit(made) == (made, None)
    as_text = own(CALLS_OF_TEXT)
    fitted, note = as_text.fit(made)
    assert note is None
    assert '<call>add{"a": "é"}</call>' in as_text.render(fitted.messages, fitted.tools)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_functions_are_written_as_text_where_there_is_no_place_for_them(system: str | None) -> None:
    front = [{"role": "system", "content": system}] if system else []
    fitted, note = own(ENDED).fit(Conversation(messages=front + MESSAGES, tools=TOOLS))
    assert note == TOOLS_AS_TEXT
    assert fitted.tools is None
    first, _, asked, result, answer = fitted.messages
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n\nThese functions" if system else "These functions")
    assert json.dumps(TOOLS[0]) in first["content"]
    assert asked == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>',
    }
    assert (result["role"], answer) == ("tool", MESSAGES[-1])
    strict = ENDED.replace(
        "{{- '<|' + m.role", "{%- if m.role == 'tool' -%}{{- raise_exception('no') -}}{%- endif -%}{{- '<|' + m.role"
    )
    fitted, _ = own(strict).fit(Conversation(messages=MESSAGES, tools=TOOLS))
    assert fitted.messages[3] == {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}
    assert MESSAGES[1]["tool_calls"], "the row stays as it is"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    made = Conversation(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}])
    assert own(ENDED).fit(made)[0].messages[0] == {"role": "system", "content": "s"}
    assert own(ENDED + "{# developer #}").fit(made)[0] == made


def test_chatml_writes_functions() -> None:
    template, notes = find_template("chatml", tokenizer("bytes"))
    assert template is not None
    assert notes == []
    assert template.fit(Conversation(messages=MESSAGES, tools=TOOLS))[1] is None
    system = {"role": "system", "content": "Be brief."}
    for front in ([], [system]):
        text = template.render(front + MESSAGES, TOOLS)
        # Tokenizers without a place for functions get the same words.
        as_text, _ = own(ENDED).fit(Conversation(messages=front + MESSAGES, tools=TOOLS))
        expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in as_text.messages)
        assert text == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_templates_begin_as_the_tokenizer_does(name: str) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    for begins in (False, True):
        made = tokenizer("bytes", begins=begins)
        template, _ = find_template(name, made)
        assert template is not None
        made.chat_template = template.text
        ids = made.apply_chat_template(messages, return_dict=False)
        assert ids.count(made.bos_token_id) == (1 if begins or name == "llama2" else 0)
        assert made.decode(ids) == template.render(messages)


def test_turns_end_with_a_token_that_there_is() -> None:
    template, notes = find_template("llama3", tokenizer("bytes"))
    assert template is not None
    assert "<|eot_id|>" not in template.text
    assert notes[0] == "data.template=llama3: this tokenizer has no token <|eot_id|>, turns end with </s> instead"
    assert notes[1].startswith(
        "data.template=llama3: this tokenizer has no token for <|end_header_id|>, <|start_header"
    )
    assert find_template("phi3", tokenizer("bytes"))[1] == []


def test_the_tokenizers_own(tmp_path: Path) -> None:
    made = tokenizer("bytes")
    assert find_template(None, made) == (None, [])
    made.chat_template = {"default": ENDED, "tool_use": CALLS}
    template, _ = find_template(None, made)
    assert template is not None
    assert template.render(MESSAGES[:1]) == made.apply_chat_template(MESSAGES[:1], tokenize=False)
    assert template.render(MESSAGES, TOOLS) == made.apply_chat_template(MESSAGES, TOOLS, tokenize=False)
    (tmp_path / "mine.jinja").write_text(ENDED)
    template, _ = find_template(str(tmp_path / "mine.jinja"), made)
    assert template is not None
    assert (template.name, template.text) == ("mine.jinja", ENDED)


@pytest.mark.parametrize(
    ("content", "setting", "message"),
    [
        (
            None,
            "chatmll",
            "data.template='chatmll' is neither a shipped chat template nor a file; did you mean chatml?",
        ),
        (None, "vicuna", "shipped are alpaca, chatml, gemma, llama2, llama3, mistral, phi3, zephyr"),
        (b"{% for m in messages %}", "mine.jinja", "chat template mine.jinja: line 1: Unexpected end of template"),
        (b"caf\xe9", "mine.jinja", "data.template='mine.jinja' is not UTF-8 text"),
    ],
)
def test_templates_that_there_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, setting: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(setting).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        find_template(setting, tokenizer("bytes"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "marks", "expected"),
    [
        ("metaspace", False, "<s>[INST] Be brief.\n\nhello [/INST] yes</s>[INST] no? [/INST] no</s>"),
        ("metaspace", True, "<s>[INST] Be brief.\n\nhello[/INST] yes</s>[INST] no?[/INST] no</s>"),
        ("bytes", True, "<s>[INST]Be brief.\n\nhello[/INST]yes</s>[INST]no?[/INST]no</s>"),
    ],
)
def test_mistrals_marks_stand_as_its_versions_want_them(kind: str, marks: bool, expected: str) -> None:
    made = tokenizer(kind, begins=True)
    if marks:
        made.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    template, notes = find_template("mistral", made)
    assert template is not None
    assert notes == []
    turns = [("system", "Be brief."), ("user", "hello"), ("assistant", "yes"), ("user", "no?"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert template.render(messages) == expected
    assert template.render(messages[:-1], ask=True) == expected.removesuffix("no</s>").rstrip(" ")


def test_what_functions_return_is_ipythons_for_llama3() -> None:
    template, _ = find_template("llama3", tokenizer("bytes"))
    assert template is not None
    written = template.render([{"role": "user", "content": "a"}, {"role": "tool", "content": "3"}])
    assert written.count("<|start_header_id|>ipython<|end_header_id|>\n\n3") == 1
    assert "tool" not in written
