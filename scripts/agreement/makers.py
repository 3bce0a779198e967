"""The encoders of those who made the models: mistral-common of Mistral, llama-models of Meta.

They say how a conversation is written for a model and into which tokens, so they are the truth for our templates of
these models. They know no labels, and functions in words of their own only: rows with functions or a system message,
which Mistral's versions put in different places, are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_offload.finetune.data.chat.conversations import Message
from lt_offload.finetune.data.formats import Example
from scripts.agreement.rows import Comparison, Rows
from scripts.agreement.tokenizers import LLAMA3, MISTRAL

TRIMMED = "white space around messages"
MARKS = "special tokens as text"
ENDS = "spaces at the end of answers"
REFUSED = "refused"
DOCUMENTED = {
    MARKS: "both packages take what looks like a special token in a message as plain text; tokenizers of Hugging Face, "
    "and so TRL, LLaMA-Factory and this package, make the token of it",
    ENDS: "mistral-common cuts spaces at the end of answers since v2, its own chat templates keep them",
    REFUSED: "mistral-common refuses answers without words, and conversations that do not end with an answer",
    TRIMMED: "llama-models keeps white space around messages, the models' published chat template cuts it",
}

Encode = Callable[[list[Message]], list[int] | None]


def encoder(template: str, tokenizer: str) -> tuple[str, Encode] | None:
    """Return the package and its encoder for a template and a tokenizer; None if there is none, or not installed."""
    if template == "mistral" and tokenizer in MISTRAL and find_spec("mistral_common") is not None:
        return "mistral-common", of_mistral(MISTRAL[tokenizer])
    if (template, tokenizer) == ("llama3", LLAMA3) and find_spec("llama_models") is not None:
        return "llama-models", of_llama()
    return None


def compare(rows: Rows, encode: Encode, result: Comparison) -> Comparison:
    """Fill ``result`` with how many conversations the maker writes with the same tokens."""
    left = 0
    for number, (ours, conversation) in enumerate(zip(rows.examples, rows.conversations, strict=True), start=1):
        if conversation is None or any(
            message["role"] not in ("user", "assistant") for message in conversation.messages
        ):
            left += 1
            continue
        ids = encode(conversation.messages)
        theirs = None if ids is None else Example(ids=ids, labels=ours.labels)
        result.add(number, ours, theirs, partial(_why, rows, encode, ours, conversation.messages))
    result.note = f"without {left} rows with functions or a system message" if left else ""
    return result


def _why(rows: Rows, encode: Encode, ours: Example, messages: list[Message]) -> list[str]:
    """Return the reasons why a conversation is not as ours, none if that is not known."""
    if encode(messages) is None:
        wordless = any(message["role"] == "assistant" and not message["content"] for message in messages)
        return [REFUSED] if wordless or messages[-1]["role"] != "assistant" else []
    trimmed = [message | {"content": message["content"].strip()} for message in messages]
    if rows.data.template == "llama3" and encode(trimmed) == ours.ids:
        return [TRIMMED]
    cut = [
        message | {"content": message["content"].rstrip(" ")} if message["role"] == "assistant" else message
        for message in messages
    ]
    if any(not message["content"] for message in cut):  # ours would still have the space before it
        return [ENDS]
    if cut != messages and rows.data.encode_conversation(cut, add_generation_prompt=False) == encode(messages):
        return [ENDS]
    special = rows.data.tokenizer.added_tokens_encoder
    return [MARKS] if any(token in message["content"] for token in special for message in messages) else []


def of_mistral(member: str) -> Encode:
    """Return the encoder of mistral-common for one of its tokenizer files."""
    tokenizers: Any = importlib.import_module("mistral_common.tokens.tokenizers.mistral")
    protocol: Any = importlib.import_module("mistral_common.protocol.instruct.messages")
    requests: Any = importlib.import_module("mistral_common.protocol.instruct.request")
    validator: Any = importlib.import_module("mistral_common.protocol.instruct.validator")
    exceptions: Any = importlib.import_module("mistral_common.exceptions")
    package: Any = importlib.import_module("mistral_common")
    file = Path(package.__file__).parents[1] / member
    made = tokenizers.MistralTokenizer.from_file(str(file), mode=validator.ValidationMode.finetuning)
    kinds = {"user": protocol.UserMessage, "assistant": protocol.AssistantMessage}

    def encode(messages: list[Message]) -> list[int] | None:
        said = [kinds[message["role"]](content=message["content"]) for message in messages]
        try:
            tokens: list[int] = made.encode_chat_completion(requests.ChatCompletionRequest(messages=said)).tokens
        except exceptions.MistralCommonException:
            return None
        return tokens

    return encode


def of_llama() -> Encode:
    """Return the encoder of llama-models."""
    chat: Any = importlib.import_module("llama_models.llama3.chat_format")
    tokenizer: Any = importlib.import_module("llama_models.llama3.tokenizer")
    types: Any = importlib.import_module("llama_models.datatypes")
    made = chat.ChatFormat(tokenizer.Tokenizer.get_instance())
    [_, *asking] = made.encode_dialog_prompt([]).tokens

    def encode(messages: list[Message]) -> list[int]:
        said = [types.RawMessage(role=message["role"], content=message["content"]) for message in messages]
        tokens: list[int] = made.encode_dialog_prompt(said).tokens
        return tokens[: -len(asking)]

    return encode
