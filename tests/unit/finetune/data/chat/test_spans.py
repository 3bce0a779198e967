"""What of a conversation is learned: templates that say it, that do not, that write earlier turns differently."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lt_offload.finetune.data.conversations import Conversation
from lt_offload.finetune.data.rows import RowFault
from lt_offload.finetune.data.spans import Locator
from lt_offload.finetune.data.templates import ChatTemplate, find_template
from lt_offload.resources import shipped_files
from tests.unit.finetune.data.vocabularies import tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENS = ("<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|endoftext|>", "<think>", "</think>")
SHIPPED = sorted(shipped_files("configs/templates", ".jinja"))

THINKING = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' -}}
{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('</think>')[-1] | trim -}}
{%- elif m.role == 'assistant' and '</think>' not in m.content -%}{{- '<think>\\n\\n</think>\\n\\n' + m.content -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""
"""Leaves out the thoughts of earlier turns, and puts empty ones into the last."""
ENDED = """\
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' -}}"""
"""Ends a conversation with one more token, as Phi-3."""
NEXT = """\
{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}"""
"""Ends no turn: the next one begins, as GLM-4."""
LATE_SYSTEM = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}{{- '[INST] ' + (system if loop.revindex <= 2 else '') + m.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + m.content + '</s>' -}}{%- endif -%}
{%- endfor -%}"""
"""Writes the system message into the last question, as Mistral 7B v0.3."""
CALLS = """\
{%- if tools -%}{{- '<|system|>' + tools | tojson + '<|end|>' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|' + m.role + '|>' + m.content -}}
{%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function | tojson + '</call>' -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}"""


def conversation(*contents: str, system: str | None = None, **more: Any) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    front = [{"role": "system", "content": system}] if system is not None else []
    return Conversation(messages=front + messages, **more)


def found(text: str, made: Conversation) -> list[str]:
    template = ChatTemplate("own", text, SPECIAL, TOKENS)
    whole, spans = Locator(template).locate(made, made.learned(False))
    assert whole == template.render(made.messages, made.tools)
    return [whole[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    ("template", "contents", "expected"),
    [
        (
            THINKING,
            ("a", "<think>hm</think>\n\nfirst", "b", "second"),
            ["first<|end|>\n", "<think>\n\n</think>\n\nsecond<|end|>\n"],
        ),
        (
            THINKING,
            ("a", " first ", "b", "<think>\nso\n</think>\nsecond", "c"),
            ["first<|end|>\n", "second<|end|>\n"],
        ),
        (ENDED, ("a", "first", "b", "second"), ["first<|end|>\n", "second<|end|>\n<|endoftext|>"]),
        (ENDED, ("a", "<|end|>\n", "b", " \n x \n"), ["<|end|>\n<|end|>\n", " \n x \n<|end|>\n<|endoftext|>"]),
        (NEXT, ("a", "first", "b", "second"), ["first<|user|>", "second"]),
        (LATE_SYSTEM, ("a", "first", "b", "second", "c"), [" first</s>", " second</s>"]),
        (ENDED, ("same", "same", "same", "same"), ["same<|end|>\n", "same<|end|>\n<|endoftext|>"]),
        (
            ENDED,
            ("<|assistant|>\nx", "y", "<|assistant|>\ny", "<|user|>\nx"),
            ["y<|end|>\n", "<|user|>\nx<|end|>\n<|endoftext|>"],
        ),
        (ENDED, ("\U000f0000", "\U000f0001x", "b", "y"), ["\U000f0001x<|end|>\n", "y<|end|>\n<|endoftext|>"]),
    ],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_templates_without_marks(template: str, contents: tuple[str, ...], expected: list[str], system: Any) -> None:
    assert found(template, conversation(*contents, system=system)) == expected


def test_calls_of_functions() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "well", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    written = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    assert found(CALLS, Conversation(messages=messages, tools=tools)) == [
        f"{written}{written}<|end|>", "It is 3<|end|>", f"well{written}<|end|>",
    ]  # fmt: skip


def test_two_answers_in_a_row_and_one_at_the_beginning() -> None:
    roles = ("assistant", "user", "assistant", "assistant", "user")
    messages = [{"role": role, "content": f"t{i}"} for i, role in enumerate(roles)]
    assert found(ENDED, Conversation(messages=messages)) == ["t0<|end|>\n", "t2<|end|>\n", "t3<|end|>\n"]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_shipped_templates_mark_what_is_found_without_marks(name: str, system: str | None) -> None:
    """As their prompt ends where the marks begin, the same is found from prompts and answers."""
    template, _ = find_template(name, tokenizer("bytes", begins=True))
    assert template is not None
    if name == "gemma" and system is not None:
        with pytest.raises(RowFault, match=r"message 1 \(role 'system'\): the chat template \(gemma\) refuses it"):
            Locator(template).locate(conversation("a", "b", system=system), [2])
        return
    made = conversation("Hello", " first\n", "again", "second", "x", "third", system=system)
    text, spans = Locator(template).locate(made, made.learned(False))
    assert [re.search("first|second|third", text[begin:end])[0] for begin, end in spans] == ["first", "second", "third"]  # type: ignore[index]
    unmarked = re.sub(r"\{%-? (end)?generation -?%\}", "", template.text)
    assert "generation %}" not in unmarked
    other = ChatTemplate(name, unmarked, template.special, template.tokens)
    assert Locator(other).locate(made, made.learned(False)) == (text, spans)
    for turn, (begin, end) in zip(made.learned(False), spans, strict=True):
        assert text[:begin] == template.render(made.messages[:turn], ask=True)
        assert text[:end].startswith(template.render(made.messages[: turn + 1]).rstrip())
    assert text.count("<s>") == (3 if name == "llama2" else 1)


@pytest.mark.parametrize(
    ("template", "made", "message"),
    [
        (
            "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + '</s>' }}{% endfor %}",
            conversation("a", "b", system="s"),
            r"message 1 \(role 'system'\) is left out by the chat template \(own\); set another data.template",
        ),
        (
            "{% for m in messages[-2:] %}{{ m.role + m.content | trim + '</s>' }}{% endfor %}",
            conversation("first", "b ", "c", "d"),
            r"message 1 \(role 'user'\) is left out",
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            conversation("a", "b", system="s"),
            r"message 1 \(role 'system'\): the chat template \(own\) refuses it: no system here",
        ),
        (
            "{% for m in messages %}{{ m.content + m.missing.key }}{% endfor %}",
            conversation("a", "b"),
            r"message 1 \(role 'user'\): the chat template \(own\) refuses it: 'dict object' has no attribute",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if tools %}{{ tools[0].function.parameters.x.y }}{% endif %}"
            "{% endfor %}",
            conversation("a", "b", tools=[{"type": "function", "function": {"name": "f"}}]),
            r"tools: the chat template \(own\) refuses it",
        ),
        (
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            conversation("a", "b", "c", "d"),
            r"message 2 \(role 'assistant'\): the chat template \(own\) writes it in a way",
        ),
    ],
)
def test_templates_that_do_not_fit(template: str, made: Conversation, message: str) -> None:
    with pytest.raises(RowFault, match=message):
        found(template, made)


def test_marks_that_are_not_one_for_each_answer() -> None:
    twice = ENDED.replace("m.content + '<|end|>\\n'", "''").replace(
        "{%- endfor -%}", "{%- generation -%}{{- m.content -}}{%- endgeneration -%}{{- '<|end|>\\n' -}}{%- endfor -%}"
    )
    assert found(twice, conversation("a", "b", "c", "d")) == ["b<|end|>\n", "d<|end|>\n<|endoftext|>"]
    split = NEXT.replace("+ m.content -}}", "-}}{%- if m.role == 'user' -%}{{- m.content -}}{%- else -%}").replace(
        "{%- endfor -%}",
        "{%- generation -%}{{- m.content -}}{%- endgeneration -%}{%- generation -%}{{- '</s>' -}}{%- endgeneration -%}"
        "{%- endif -%}{%- endfor -%}",
    )
    assert found(split, conversation("a", "b", "c", "d")) == ["b</s>", "d</s>"]
