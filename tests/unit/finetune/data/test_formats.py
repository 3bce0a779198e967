from __future__ import annotations

from typing import Any

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data.formats import IGNORED, Example, encode_alpaca, encode_prompt, encode_text
from tests.support import tiny


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load.load_tokenizer(str(tiny.tokenizer(tmp_path_factory.mktemp("plain"))))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load.load_tokenizer(str(tiny.tokenizer(tmp_path_factory.mktemp("chat"), chat=True)))


ROW = {"instruction": "Add.", "input": "1 2", "output": "3"}


def test_text_learns_every_token_and_the_end(plain: Any) -> None:
    example = encode_text(plain, "héllo\n")
    assert plain.decode(example.ids) == "héllo\n</s>"
    assert example.labels == example.ids


def test_alpaca_learns_only_the_response(plain: Any) -> None:
    example = encode_alpaca(plain, ROW)
    learned = [token for token, label in zip(example.ids, example.labels, strict=True) if label != IGNORED]
    assert plain.decode(learned) == "3</s>"
    text = plain.decode(example.ids)
    assert "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>" in text


@pytest.mark.parametrize("missing", [None, ""])
def test_alpaca_without_input_has_no_input_section(plain: Any, missing: str | None) -> None:
    text = plain.decode(encode_alpaca(plain, ROW | {"input": missing}).ids)
    assert "Input" not in text
    assert text == plain.decode(encode_alpaca(plain, {"instruction": "Add.", "output": "3"}).ids)


def test_alpaca_uses_the_chat_template(chat: Any) -> None:
    example = encode_alpaca(chat, ROW)
    assert chat.decode(example.ids) == "<|user|>Add.\n\n1 2</s><|assistant|>3</s>"
    learned = [label for label in example.labels if label != IGNORED]
    assert chat.decode(learned) == "3</s>"
    assert example.ids == chat.apply_chat_template(
        [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}], return_dict=False
    )


def test_a_template_that_hides_its_prompt_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = load.load_tokenizer(str(tiny.tokenizer(tmp_path_factory.mktemp("odd"))))
    tokenizer.chat_template = "{% if add_generation_prompt %}ASK{% else %}{{ messages[-1]['content'] }}{% endif %}"
    with pytest.raises(ConfigError, match="chat template"):
        encode_alpaca(tokenizer, ROW)


def test_prompt_is_what_training_showed(plain: Any, chat: Any) -> None:
    assert plain.decode(encode_prompt("text", plain, "once")) == "once"
    for tokenizer in (plain, chat):
        example = encode_alpaca(tokenizer, {"instruction": "Add.", "output": "3"})
        prompt = encode_prompt("alpaca", tokenizer, "Add.")
        assert example.ids[: len(prompt)] == prompt
        assert example.labels[len(prompt)] != IGNORED
        assert set(example.labels[: len(prompt)]) == {IGNORED}


@pytest.mark.parametrize(
    ("labels", "trainable"), [([5, IGNORED], False), ([IGNORED, 5], True), ([IGNORED, IGNORED], False)]
)
def test_the_first_token_is_never_predicted(labels: list[int], trainable: bool) -> None:
    assert Example(ids=[5, 5], labels=labels).trainable is trainable
