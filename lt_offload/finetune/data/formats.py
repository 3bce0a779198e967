"""Makes token ids and labels from the rows of a data set, in a prompt if they are instructions.

Labels are the ids that the model is to predict, ``IGNORED`` where nothing is learned; the model shifts them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a position without loss."""

Format = Literal["text", "alpaca"]
Row = Mapping[str, Any]

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One tokenised row; both lists have the same length."""

    ids: list[int]
    labels: list[int]

    @property
    def trainable(self) -> bool:
        """Whether any token counts in the loss. The first one never does: nothing comes before it."""
        return any(label != IGNORED for label in self.labels[1:])

    def cut(self, length: int) -> Example:
        """Return the first ``length`` tokens."""
        return self if len(self.ids) <= length else Example(ids=self.ids[:length], labels=self.labels[:length])


def encoder(format: Format, tokenizer: PreTrainedTokenizerBase, text_column: str) -> Callable[[Row], Example]:
    """Return the function that turns a row of ``format`` into an example."""
    if format == "text":
        return lambda row: encode_text(tokenizer, row[text_column])
    return lambda row: encode_alpaca(tokenizer, row)


def columns(format: Format, text_column: str) -> tuple[str, ...]:
    """Return the columns that rows of ``format`` must have."""
    return (text_column,) if format == "text" else ("instruction", "output")


def optional_columns(format: Format) -> tuple[str, ...]:
    """Return the columns that rows of ``format`` may have."""
    return () if format == "text" else ("input",)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Example:
    """Every token is learned; the end-of-text token closes the document if the tokenizer has one."""
    ids = _tokens(tokenizer, text) + _end(tokenizer)
    return Example(ids=ids, labels=list(ids))


def encode_alpaca(tokenizer: PreTrainedTokenizerBase, row: Row) -> Example:
    """Only the response is learned. The prompt is the tokenizer's chat template, else the one of Stanford Alpaca."""
    question, output = _question(row), row["output"] or ""
    prompt = _prompt(tokenizer, row)
    if tokenizer.chat_template:
        answer = {"role": "assistant", "content": output}
        whole = str(tokenizer.apply_chat_template([question, answer], tokenize=False))
        if not whole.startswith(prompt):
            raise ConfigError(
                "the tokenizer's chat template writes a conversation that does not begin with its own prompt, so the "
                "response cannot be told apart; choose another one with --data.tokenizer"
            )
        tail = _tokens(tokenizer, whole[len(prompt) :])
    else:
        tail = _tokens(tokenizer, output) + _end(tokenizer)
    head = _tokens(tokenizer, prompt)
    # An empty response would teach the model to say nothing.
    learned = tail if output.strip() else [IGNORED] * len(tail)
    return Example(ids=head + tail, labels=[IGNORED] * len(head) + learned)


def encode_prompt(format: Format, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the tokens to be continued: the text itself, or the instruction as it looks in training."""
    text = prompt if format == "text" else _prompt(tokenizer, {"instruction": prompt})
    return _tokens(tokenizer, text)


def _question(row: Row) -> dict[str, str]:
    parts = [row["instruction"] or "", row.get("input") or ""]
    return {"role": "user", "content": "\n\n".join(part for part in parts if part)}


def _prompt(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template([_question(row)], tokenize=False, add_generation_prompt=True))
    template = _WITH_INPUT if row.get("input") else _WITHOUT_INPUT
    return template.format(instruction=row["instruction"] or "", input=row.get("input") or "")


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose=False: a document longer than the model's context is no news, it is going to be packed or cut.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
