"""Token ids and labels of the rows of a data set, exactly as the tokenizer and its chat template write them.

Labels are the ids that the model is to predict, ``IGNORED`` where nothing is learned; the model shifts them itself. A
text is tokenised as a whole; a token is learned if it stands for any character of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.columns import NEEDED, Columns
from lt_offload.finetune.data.conversations import Conversation, from_row, oddities, parse_messages, with_prompt
from lt_offload.finetune.data.rows import Row, RowFault
from lt_offload.finetune.data.spans import Locator
from lt_offload.finetune.data.templates import OWN, ChatTemplate, Span, find_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a position without loss."""

Made = TypeVar("Made")
TrainOn = Literal["responses", "last", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One tokenised row; both lists have the same length."""

    ids: list[int]
    labels: list[int]
    second: int = 0
    """The place at which the rejected answer of a pair begins, with its prompt, behind the chosen one; 0: no pair."""
    place: str = field(default="", compare=False)
    """The file and the row of its origin."""
    notes: Sequence[str] = field(default=(), compare=False)
    """Changes that were made to write it, and its unusual features."""

    def sides(self) -> dict[str, Example]:
        """Return the two examples of a pair by their roles."""
        parts = {"chosen": slice(self.second), "rejected": slice(self.second, None)}
        return {role: Example(ids=self.ids[p], labels=self.labels[p], place=self.place) for role, p in parts.items()}


@dataclass(frozen=True, slots=True)
class Written:
    """A row as text, to be tokenised as a whole, with the ranges of characters in it that are learned.

    ``notes`` are changes that were made to write it, and its unusual features.
    """

    text: str
    learned: Sequence[Span]
    notes: Sequence[str] = ()


class Encoder:
    """A converter of rows into examples, by the settings of data of these names.

    Without a chat template instructions are written by the shipped one ``alpaca``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: ChatTemplate | None = None,
        train_on: TrainOn = "responses",
        system: str | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer ({type(tokenizer).__name__}) does not say which characters a token stands for, so "
                "answers cannot be told apart; name a model with a tokenizer.json with --data.tokenizer"
            )
        writer = template or find_template("alpaca", tokenizer)[0]
        assert writer is not None, "a template by its name"
        self.tokenizer = tokenizer
        self.template = template
        self.train_on = train_on
        self.system = system
        self.locator = Locator(writer)
        end = tokenizer.eos_token_id
        self.closes_itself = end is not None and list(tokenizer("a")["input_ids"])[-1:] == [end]
        """True if the tokenizer itself adds the end token to every text."""

    def check(self, layout: Columns) -> None:
        """Raise ``ConfigError`` if a setting has no place in the format of the data, or a chat template is needed."""
        if layout.format == "preference" and self.train_on == "all":
            raise ConfigError(
                "data.train_on=all: data.format=preference compares answers, and no prompts; set it to responses"
            )
        if layout.of_texts:
            what, hint = "plain text", "; set it to null"
            if layout.format == "preference":
                what = "prompts and answers that are texts"
            elif layout.format == "completion":
                what = "a prompt and a completion that are texts"
                hint += f", or make conversations of them: {as_conversations(layout)}"
            own = self.template is None or self.template.name == OWN
            for name, is_set in (("template", not own), ("system", self.system is not None)):
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
        if closing := self.locator.closing.strip():
            # Only a token that was added to the vocabulary ends a turn: where a template writes
            # plain characters instead, their first token may begin many other words.
            first = self.tokenizer(closing, add_special_tokens=False)["input_ids"][:1]
            if first and self.tokenizer.convert_ids_to_tokens(first[0]) in self.tokenizer.added_tokens_encoder:
                tokens += [token for token in first if token not in tokens]
        return tokens

    def encode(self, rows: Sequence[Row | RowFault], layout: Columns) -> list[Example | RowFault]:
        """Return an example for each row, or the fault of a row that cannot be used; faults are handed on."""
        if layout.format == "preference":
            rows = [_or_fault(with_prompt, row, layout) for row in rows]
            return list(map(_pair, *(self.encode(rows, layout.side(role)) for role in NEEDED[layout.format])))
        made = [_or_fault(self.write, row, layout) for row in rows]
        written = [each for each in made if isinstance(each, Written)]
        if not written:
            return [each for each in made if isinstance(each, RowFault)]
        # verbose=False: a document longer than the model's context is no news, it is going to be packed or cut.
        batch: Any = self.tokenizer([each.text for each in written], add_special_tokens=layout.of_texts, verbose=False)
        tokens = zip(batch["input_ids"], batch.encodings, strict=True)
        return [each if isinstance(each, RowFault) else _example(each, *next(tokens)) for each in made]

    def write(self, row: Row, layout: Columns) -> Written:
        """Return a row as text; raises ``RowFault`` if it has none, or the chat template cannot write it."""
        if not layout.of_texts:
            conversation = self.conversation(row, layout)
            notes = oddities(conversation)
            conversation, note = self.locator.template.fit(conversation)
            text, spans = self.locator.locate(conversation, conversation.learned(self.train_on == "last"))
            learned = [(0, len(text))] if self.train_on == "all" else spans
            return Written(text, learned, (*notes, *([] if note is None else [note])))
        roles = NEEDED[layout.format]
        prompt, answer = ("", *(layout.text(row, role) for role in roles))[-2:]
        end = self.tokenizer.eos_token
        text = prompt + answer
        # The token is written into the text, of which a tokenizer makes its special
        # token. Some data end with it already.
        if end is not None and not self.closes_itself and not text.endswith(str(end)):
            text += str(end)
        begin = 0 if self.train_on == "all" else len(prompt)
        return Written(text, [(begin, len(text))] if answer.strip() else [])

    def conversation(self, row: Row, layout: Columns) -> Conversation:
        """Return the messages of a row, with ``data.system``."""
        return self._with_system(from_row(row, layout))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *, ask: bool
    ) -> list[int]:
        """Return the tokens of a conversation, with ``ask`` up to where the assistant goes on.

        Raises ``ConfigError`` if the chat template refuses it.
        """
        template = self.locator.template
        try:
            parsed = parse_messages(messages, "messages")
            whole = Conversation(messages=parsed, tools=[dict(tool) for tool in tools] if tools else None)
            conversation, _ = template.fit(self._with_system(whole))
            text = template.render(conversation.messages, conversation.tools, ask=ask)
        except RowFault as fault:
            raise ConfigError(f"the conversation cannot be written: {fault}") from fault
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def text_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued."""
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        # The token that ends the text is left out: behind it there is nothing to continue.
        return ids[:-1] if self.closes_itself and ids else ids

    def _with_system(self, conversation: Conversation) -> Conversation:
        return conversation if self.system is None or conversation.has_system else conversation.with_system(self.system)


def _example(written: Written, ids: list[int], encoding: Any) -> Example:
    """Return the tokens of a text, of which those are learned that stand for any character of its learned ranges."""
    labels, whole = [IGNORED] * len(ids), len(written.text)
    for begin, end in written.learned:
        # Tokens that the tokenizer adds stand for no characters. The one
        # that ends a text has to be learned, too.
        if begin == 0 and end == whole:
            labels = ids
        elif tokens := [i for i, (start, stop) in enumerate(encoding.offsets) if start < end and stop > begin]:
            stop = len(ids) if end == whole else tokens[-1] + 1
            labels[tokens[0] : stop] = ids[tokens[0] : stop]
    return Example(ids=ids, labels=labels, notes=written.notes)


def _or_fault(make: Callable[[Row, Columns], Made], row: Row | RowFault, layout: Columns) -> Made | RowFault:
    try:
        return row if isinstance(row, RowFault) else make(row, layout)
    except RowFault as fault:
        return fault


def _pair(chosen: Example | RowFault, rejected: Example | RowFault) -> Example | RowFault:
    """Return both answers of a row, each behind the prompt, or the first fault of them."""
    if isinstance(chosen, RowFault) or isinstance(rejected, RowFault):
        return chosen if isinstance(chosen, RowFault) else rejected
    notes = dict.fromkeys([*chosen.notes, *rejected.notes])
    if chosen.ids == rejected.ids:
        notes["the chosen answer is the rejected one: nothing is learned from it"] = None
    ids, labels = chosen.ids + rejected.ids, chosen.labels + rejected.labels
    return Example(ids=ids, labels=labels, second=len(chosen.ids), notes=[*notes])


def as_conversations(layout: Columns) -> str:
    """Return the flag that makes conversations of prompts and completions that are texts."""
    return f"--data.columns '{{instruction: {layout.columns['prompt']}, output: {layout.columns['completion']}}}'"
