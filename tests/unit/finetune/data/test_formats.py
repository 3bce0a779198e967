"""Tokens exactly as the tokenizer and its chat template give them, and labels where an answer is."""

from __future__ import annotations

from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.columns import Columns, find_columns
from lt_offload.finetune.data.formats import IGNORED, Encoder, Example
from lt_offload.finetune.data.rows import Row, RowFault
from lt_offload.finetune.data.templates import find_template
from tests.support.tiny import CHAT_TEMPLATE
from tests.unit.finetune.data.vocabularies import tokenizer

KINDS = ("bytes", "metaspace")
ROW = {"instruction": "say", "input": "it", "output": "Yes it is"}


def encoder(own: Any, template: str | None = None, **settings: Any) -> Encoder:
    found, _ = find_template(template, own)
    return Encoder(own, template=found, **settings)


def encode(made: Encoder, row: Row, format: Any = "auto", **columns: str) -> Example:
    layout = find_columns(format, columns, list(row), row, "data.path")
    made.check(layout)
    [found] = made.encode([row], layout)
    if isinstance(found, RowFault):
        raise found
    return found


def learned(example: Example) -> list[int]:
    assert all(label in (IGNORED, token) for token, label in zip(example.ids, example.labels, strict=True))
    return [label for label in example.labels if label != IGNORED]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Yes, the answer is no.", " say café\n", "</s> in the middle", "ends</s>", "😀"])
def test_text_is_what_the_tokenizer_gives_with_its_end(kind: str, text: str) -> None:
    own = tokenizer(kind, begins=True)
    example = encode(encoder(own), {"text": text})
    assert example.ids == own(text if text.endswith("</s>") else text + "</s>")["input_ids"]
    assert example.ids[0] == own.bos_token_id
    assert example.ids[-1] == own.eos_token_id
    assert example.labels == example.ids


def test_a_tokenizer_that_ends_texts_itself_gets_no_second_end() -> None:
    own = tokenizer("bytes", ends=True)
    assert encode(encoder(own), {"text": "Yes"}).ids == own("Yes")["input_ids"]
    example = encode(encoder(own), {"prompt": "Yes", "completion": " no"})
    assert example.ids == own("Yes no")["input_ids"]
    assert learned(example) == own(" no")["input_ids"]
    assert encoder(own).text_prompt("Yes") == own("Yes", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("### Response:\n", "Yes it is"),
        ("question: ", "answer"),
        ("question:", " answer"),
        ("say", "yes"),
        ("12", "3"),
        ("hel", "lo there"),
        ("a ", " b"),
        ("ends in 😀", "😀 goes on"),
    ],
)
def test_prompt_and_completion_are_tokenised_together(kind: str, begins: bool, prompt: str, completion: str) -> None:
    own = tokenizer(kind, begins=begins)
    example = encode(encoder(own), {"prompt": prompt, "completion": completion})
    assert example.ids == own(prompt + completion + "</s>")["input_ids"]
    answer = learned(example)
    assert answer == example.ids[-len(answer) :]
    # The first learned token is the first one with a character of the completion.
    offsets = own(prompt + completion + "</s>", return_offsets_mapping=True)["offset_mapping"]
    with_answer = [end > len(prompt) for begin, end in offsets]
    assert [label != IGNORED for label in example.labels] == with_answer


def test_no_space_comes_between_prompt_and_answer() -> None:
    own = tokenizer("metaspace", begins=True)
    example = encode(encoder(own), {"instruction": "say", "output": "Yes"})
    assert own.convert_ids_to_tokens(learned(example)) == ["Yes", "</s>"]
    assert own("Yes", add_special_tokens=False).tokens()[0].startswith("▁")


@pytest.mark.parametrize("kind", KINDS)
def test_instructions_without_a_chat_template(kind: str) -> None:
    own = tokenizer(kind, begins=True)
    text = own.decode(encode(encoder(own), ROW).ids)
    assert "further context" in text
    assert text.endswith("### Instruction:\nsay\n\n### Input:\nit\n\n### Response:\nYes it is</s>")
    without = encode(encoder(own), ROW | {"input": None})
    assert "Input" not in own.decode(without.ids)
    assert without == encode(encoder(own), {"instruction": "say", "output": "Yes it is"})
    prompt = encoder(own).prompt([{"role": "user", "content": "say"}], ask=True)
    assert without.ids[: len(prompt)] == prompt
    assert set(without.labels[: len(prompt)]) == {IGNORED}
    assert own.decode(learned(without)) == "Yes it is</s>"
    with_system = own.decode(encode(encoder(own, system="Be brief."), ROW).ids)
    assert with_system.startswith("<s> Be brief.\n\n### Ins" if kind == "metaspace" else "<s>Be brief.\n\n### Ins")


@pytest.mark.parametrize("kind", KINDS)
def test_instructions_become_messages_where_there_is_a_chat_template(kind: str) -> None:
    own = tokenizer(kind, begins=True, template=CHAT_TEMPLATE)
    made = encoder(own)
    example = encode(made, ROW)
    messages = [{"role": "user", "content": "say\n\nit"}, {"role": "assistant", "content": "Yes it is"}]
    assert example.ids == own.apply_chat_template(messages, return_dict=False)
    assert own.decode(learned(example)) == "Yes it is</s>"
    assert made.prompt(messages[:1], ask=True) == example.ids[: -len(learned(example))]
    again = encode(made, ROW | {"system": "Be", "history": [["a", "b"], ["c", "d"]]})
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    contents = ["Be", "a", "b", "c", "d", "say\n\nit", "Yes it is"]
    whole = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    assert again.ids == own.apply_chat_template(whole, return_dict=False)
    assert own.decode(learned(again)).replace("</s> ", "</s>") == "b</s>d</s>Yes it is</s>"


@pytest.mark.parametrize("train_on", ["responses", "last", "all"])
def test_what_is_learned_of_a_conversation(train_on: Any) -> None:
    own = tokenizer("bytes", template=CHAT_TEMPLATE)
    turns = [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second"), ("user", "c")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    example = encode(encoder(own, train_on=train_on), row)
    assert example.ids == own.apply_chat_template(row["messages"], return_dict=False)
    expected = {"responses": "first</s>second</s>", "last": "second</s>", "all": own.decode(example.ids)}
    assert own.decode(learned(example)) == expected[train_on]


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_teaches_nothing(answer: str) -> None:
    for template in (None, CHAT_TEMPLATE):
        own = tokenizer("metaspace", begins=True, template=template)
        assert not learned(encode(encoder(own), {"instruction": "say", "output": answer}))
    assert not learned(encode(encoder(own), {"prompt": "say", "completion": answer}))
    assert not learned(encode(encoder(own), {"text": answer}))
    turns = [("user", "a"), ("assistant", answer), ("user", "b"), ("assistant", "second")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert own.decode(learned(encode(encoder(own), row))) == "second</s>"


def test_a_weight_of_zero_is_not_learned() -> None:
    own = tokenizer("bytes", template=CHAT_TEMPLATE)
    turns = [("user", "a", 1), ("assistant", "first", 0), ("user", "b", 1), ("assistant", "second", 1)]
    row = {"messages": [{"role": role, "content": text, "weight": weight} for role, text, weight in turns]}
    assert own.decode(learned(encode(encoder(own), row))) == "second</s>"


def test_a_prompt_of_messages_is_context() -> None:
    own = tokenizer("bytes", template=CHAT_TEMPLATE)
    turns = [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]
    messages = [{"role": role, "content": text} for role, text in turns]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    for system in (None, "Be brief."):
        example = encode(encoder(own, system=system), row)
        assert own.decode(learned(example)) == "second</s>"
        front = [{"role": "system", "content": system}] if system else []
        assert example.ids == own.apply_chat_template(front + messages, return_dict=False)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"messages": []}, {}, "needs a chat template, and this tokenizer has none; .* --data.template chatml"),
        ({"prompt": [], "completion": []}, {}, "needs a chat template"),
        ({"text": "a"}, {"template": "chatml"}, "data.template has no place in data.format=text: it is plain text"),
        ({"text": "a"}, {"system": "b"}, "data.system has no place in data.format=text"),
        ({"text": "a"}, {"train_on": "last"}, "data.train_on=last: data.format=text has no answers"),
        (
            {"prompt": "a", "completion": "b"},
            {"template": "chatml"},
            "make conversations of them: --data.columns '{instruction: prompt, output: completion}'",
        ),
    ],
)
def test_settings_without_a_place_in_the_format(row: Row, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode(encoder(tokenizer("bytes"), **settings), row)


def test_history_without_a_chat_template_is_several_instructions() -> None:
    own = tokenizer("bytes")
    example = encode(encoder(own), ROW | {"history": [["ask", "No."]]})
    assert own.decode(example.ids).count("### Instruction:") == 2
    assert own.decode(learned(example)) == "No.</s>Yes it is</s>"


def test_a_tokenizer_that_does_not_know_its_characters_is_refused() -> None:
    own = tokenizer("bytes")

    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="Slow.* --data.tokenizer"):
        Encoder(Slow())  # type: ignore[arg-type]
    assert Encoder(own).ends == [own.eos_token_id]


def test_what_ends_an_answer() -> None:
    own = tokenizer("bytes", template=None)
    assert own.convert_ids_to_tokens(encoder(own, "chatml").ends) == ["</s>", "<|im_end|>"]
    assert own.convert_ids_to_tokens(encoder(own, "zephyr").ends) == ["</s>"]


def test_rows_of_both_kinds_in_one_batch_keep_their_order() -> None:
    own = tokenizer("bytes", begins=True)
    layout = Columns("text", {"text": "text"}, {})
    rows: list[Any] = [{"text": "Yes"}, RowFault("bad"), {"text": 3}, {"text": "no"}]
    made: list[Any] = encoder(own).encode(rows, layout)
    assert [isinstance(each, RowFault) for each in made] == [False, True, True, False]
    assert [own.decode(made[i].ids) for i in (0, 3)] == ["<s>Yes</s>", "<s>no</s>"]
