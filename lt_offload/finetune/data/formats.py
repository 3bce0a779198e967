"""Token ids and labels of the rows of a data set, exactly as the tokenizer and its chat template write them.

Labels are the ids that the model is to predict, ``IGNORED`` where nothing is learned; the model shifts them itself. A
text is tokenised as a whole; a token is learned if it stands for any character of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.chat.conversations import (
    Conversation,
    from_row,
    history,
    oddities,
    parse_messages,
)
from lt_offload.finetune.data.chat.spans import Locator
from lt_offload.finetune.data.chat.templates import ChatTemplate, Span
from lt_offload.finetune.data.columns import Columns
from lt_offload.finetune.data.rows import Row, RowFault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a position without loss."""

TrainOn = Literal["responses", "last", "all"]

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One tokenised row; both lists have the same length."""

    ids: list[int]
    labels: list[int]
    place: str = field(default="", compare=False)
    """The file and the row of its origin."""
    notes: Sequence[str] = field(default=(), compare=False)
    """Changes that were made to write it, and its unusual features."""

    @property
    def trainable(self) -> bool:
        """True if any token counts in the loss. The first one never does: nothing comes before it."""
        return any(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Written:
    """A row as text, to be tokenised as a whole, with the ranges of characters in it that are learned.

    To a ``plain`` one the tokenizer adds its own tokens, as the one that begins a text; a chat template writes them.
    ``notes`` are changes that were made to write it, and its unusual features.
    """

    text: str
    learned: Sequence[Span]
    plain: bool = False
    notes: tuple[str, ...] = ()


class Encoder:
    """A converter of rows into examples, by the settings of data of these names.

    ``explicit_template``: the user has named ``template``, and it is not just the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: ChatTemplate | None = None,
        train_on: TrainOn = "responses",
        system: str | None = None,
        explicit_template: bool = False,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer ({type(tokenizer).__name__}) does not say which characters a token stands for, so "
                "answers cannot be told apart; name a model with a tokenizer.json with --data.tokenizer"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.train_on = train_on
        self.system = system
        self.explicit_template = explicit_template
        self.locator = Locator(template) if template is not None else None
        end = tokenizer.eos_token_id
        self.closes_itself = end is not None and list(tokenizer("a")["input_ids"])[-1:] == [end]
        """True if the tokenizer itself adds the end token to every text."""

    def check(self, layout: Columns) -> None:
        """Raise ``ConfigError`` if a setting has no place in the format of the data, or a chat template is needed."""
        if layout.of_texts:
            what, hint = "plain text", "; set it to null"
            if layout.format == "completion":
                what = "a prompt and a completion that are texts"
                hint += f", or make conversations of them: {as_conversations(layout)}"
            for name, is_set in (("template", self.explicit_template), ("system", self.system is not None)):
                if is_set:
                    raise ConfigError(f"data.{name} has no place in data.format={layout.format}: it is {what}{hint}")
        if layout.format == "text" and self.train_on == "last":
            raise ConfigError("data.train_on=last: data.format=text has no answers; set it to responses")
        if not layout.of_texts and layout.format != "alpaca" and self.template is None:
            raise ConfigError(
                f"data.format={layout.format} needs a chat template, and this tokenizer has none; choose one, for "
                "example --data.template chatml (or the one that the model was trained with)"
            )

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer of the model: the end of a text, and the end of a turn."""
        tokens = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        if self.locator is not None and (closing := self.locator.closing.strip()):
            # Only a token that was added to the vocabulary ends a turn: where a template writes
            # plain characters instead, their first token may begin many other words.
            first = self.tokenizer(closing, add_special_tokens=False)["input_ids"][:1]
            if first and self.tokenizer.convert_ids_to_tokens(first[0]) in self.tokenizer.added_tokens_encoder:
                tokens += [token for token in first if token not in tokens]
        return tokens

    def encode(self, rows: Sequence[Row | RowFault], layout: Columns) -> list[Example | RowFault]:
        """Return an example for each row, or the fault of a row that cannot be used; faults are handed on."""
        made: list[Any] = []
        for row in rows:
            try:
                if isinstance(row, RowFault):
                    raise row
                made.append(self.write(row, layout))
            except RowFault as fault:
                made.append(fault)
        # There are two calls, as a tokenizer adds its own tokens to every text of a call or to none.
        for plain in (True, False):
            numbers = [i for i, each in enumerate(made) if isinstance(each, Written) and each.plain is plain]
            for number, example in zip(numbers, self._tokenize([made[i] for i in numbers], plain), strict=True):
                made[number] = example
        return made

    def write(self, row: Row, layout: Columns) -> Written:
        """Return a row as text; raises ``RowFault`` if it has no text."""
        if layout.format == "text":
            return self._plain("", layout.text(row, "text"))
        if layout.of_texts:
            return self._plain(layout.text(row, "prompt"), layout.text(row, "completion"))
        conversation = self.conversation(row, layout)
        return self._alpaca(row, layout) if conversation is None else self.write_conversation(conversation)

    def conversation(self, row: Row, layout: Columns) -> Conversation | None:
        """Return the messages of a row, with ``data.system``; None if no chat template writes it."""
        if layout.of_texts or (layout.format == "alpaca" and self.template is None):
            return None
        return self._with_system(from_row(row, layout))

    def write_conversation(self, conversation: Conversation) -> Written:
        """Return a conversation as the chat template writes it; raises ``RowFault`` if it cannot."""
        assert self.template is not None, "check() comes first"
        assert self.locator is not None
        notes = oddities(conversation)
        conversation, note = self.template.fit(conversation)
        turns = conversation.learned(self.train_on == "last")
        text, spans = self.locator.locate(conversation, turns)
        learned = [(0, len(text))] if self.train_on == "all" else spans
        return Written(text, learned, notes=(*notes, *([] if note is None else [note])))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *, ask: bool
    ) -> list[int]:
        """Return the tokens of a conversation, with ``ask`` up to where the assistant goes on.

        Raises ``ConfigError`` if there is no chat template, or it refuses the conversation.
        """
        if self.template is None:
            raise ConfigError(
                "a conversation needs a chat template, and this tokenizer has none; choose one, for example "
                "--data.template chatml; a model trained on instructions without one knows --data.template alpaca"
            )
        try:
            parsed = parse_messages(messages, "messages")
            whole = self._with_system(
                Conversation(messages=parsed, tools=[dict(tool) for tool in tools] if tools else None)
            )
            conversation, _ = self.template.fit(whole)
            text = self.template.render(conversation.messages, conversation.tools, ask=ask)
        except RowFault as fault:
            raise ConfigError(f"the conversation cannot be written: {fault}") from fault
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def text_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued."""
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        # The token that ends the text is left out: behind it there is nothing to continue.
        return ids[:-1] if self.closes_itself and ids else ids

    def alpaca_prompt(self, instruction: str) -> list[int]:
        """Return the tokens of an instruction without a chat template."""
        return self.text_prompt(_stanford(f"{self.system}\n\n" if self.system else _WITHOUT_INPUT, instruction, ""))

    def _with_system(self, conversation: Conversation) -> Conversation:
        messages = conversation.messages
        if self.system is None or messages[0]["role"] in ("system", "developer"):
            return conversation
        return Conversation(
            messages=[{"role": "system", "content": self.system}, *messages],
            tools=conversation.tools,
            context=conversation.context + 1 if conversation.context else 0,
        )

    def _alpaca(self, row: Row, layout: Columns) -> Written:
        """Return an instruction in Stanford Alpaca's words."""
        if history(row, layout):
            raise RowFault("history needs a chat template, and this tokenizer has none; choose one with data.template")
        added = layout.text(row, "input")
        system = layout.text(row, "system") or self.system
        intro = f"{system}\n\n" if system else _WITH_INPUT if added else _WITHOUT_INPUT
        return self._plain(_stanford(intro, layout.text(row, "instruction"), added), layout.text(row, "output"))

    def _plain(self, prompt: str, answer: str) -> Written:
        """Return a text whose ``answer`` is learned, with the token that ends it; without a ``prompt`` all of it is."""
        text = prompt + answer
        end = self.tokenizer.eos_token
        # The token is written into the text, of which a tokenizer makes its special
        # token. Some data end with it already.
        if end is not None and not self.closes_itself and not text.endswith(str(end)):
            text += str(end)
        begin = 0 if not prompt or self.train_on == "all" else len(prompt)
        return Written(text, [(begin, len(text))] if answer.strip() else [], plain=True)

    def _tokenize(self, written: Sequence[Written], plain: bool) -> list[Example]:
        if not written:
            return []
        # verbose=False: a document longer than the model's context is no news, it is going to be packed or cut.
        batch = self.tokenizer([each.text for each in written], add_special_tokens=plain, verbose=False)
        examples = []
        for number, (ids, each) in enumerate(zip(batch["input_ids"], written, strict=True)):
            labels = [IGNORED] * len(ids)
            for begin, end in each.learned:
                # Tokens that the tokenizer adds stand for no characters. The
                # one that ends a text has to be learned, too.
                if begin == 0 and end == len(each.text):
                    labels = list(ids)
                    continue
                tokens = [i for i, (start, stop) in enumerate(batch[number].offsets) if start < end and stop > begin]
                if tokens:
                    stop = len(ids) if end == len(each.text) else tokens[-1] + 1
                    labels[tokens[0] : stop] = ids[tokens[0] : stop]
            examples.append(Example(ids=list(ids), labels=labels, notes=each.notes))
        return examples


def as_conversations(layout: Columns) -> str:
    """Return the flag that makes conversations of prompts and completions that are texts."""
    return f"--data.columns '{{instruction: {layout.columns['prompt']}, output: {layout.columns['completion']}}}'"


def _stanford(intro: str, instruction: str, added: str) -> str:
    middle = f"### Input:\n{added}\n\n" if added else ""
    return f"{intro}### Instruction:\n{instruction}\n\n{middle}### Response:\n"
