"""The assistant's words in the text of a conversation, to the character.

A template may say it itself (``{% generation %}``). For the others the words of each message are found by marks around
them, and a turn is what stands between the text that asks for it and the text that ends it, or what the template adds
to the conversation before it. The token that ends a turn is learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix

from lt_offload.finetune.data.chat.conversations import Conversation, Message
from lt_offload.finetune.data.chat.templates import ChatTemplate, Span
from lt_offload.finetune.data.rows import RowFault

_PLANES = (0xF0000, 0x100000)
"""First characters of the private planes, of which marks are."""
_PLANE = 0xFFFE
_OTHER = "\U0010fffd"
"""A character that no text has, in a message that is changed."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a template writes around the words of the assistant, in a turn that others follow.

    Args:
        header: what asks for the turn.
        closing: what ends the turn; empty if that is the token that begins the next one.
    """

    header: str = ""
    closing: str = ""


class Locator:
    """Finds the turns of the assistant in conversations of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def locate(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text of ``conversation``, and where the messages ``turns``, which are the assistant's, are in it.

        Raises:
            RowFault: if the template refuses it, leaves out a message, or cannot be understood.
        """
        messages = conversation.messages
        try:
            text, generated = self.template.render_with_spans(messages, conversation.tools)
        except RowFault as fault:
            raise self.template.blame(conversation, fault) from None
        # Marks do not say that all is there: a template with marks can leave out a message like any other.
        self._check_complete(conversation, text)
        if generated is not None and (spans := _of_turns(generated, messages, turns)) is not None:
            return text, spans
        words = self._words(conversation, text)
        spans_of: dict[int, Span] = {}
        end = 0
        # Earlier turns that are not learned are found as well: a call without words stands behind the turn before it.
        for turn, message in enumerate(messages[: max(turns, default=-1) + 1]):
            if message["role"] == "assistant":
                spans_of[turn] = self._span(conversation, text, turn, words, end)
                end = spans_of[turn][1]
        return text, [spans_of[turn] for turn in turns]

    @property
    def closing(self) -> str:
        """The text with which the template ends a turn of the assistant; empty where that cannot be told."""
        return self.surroundings.closing

    @cached_property
    def surroundings(self) -> Surroundings:
        """The text that the template writes around a turn, tried out; empty where that cannot be told."""
        words = ("question", "answer", "another", "final")
        messages = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
        try:
            before, asking = self.template.render(messages[:1]), self.template.render(messages[:1], ask=True)
            until, text = self.template.render(messages[:2]), self.template.render(messages)
        except RowFault:
            return Surroundings()
        # A prompt may say more than the conversation, as an opening of thoughts, which earlier turns do not have.
        begin = self._common(asking, text)
        header = text[self._common(before, asking) : begin] or text[text.find(words[0]) + len(words[0]) : begin]
        answer = text.find(words[1], begin)
        if answer < 0 or until.rfind(words[1]) < 0:
            return Surroundings(header)
        # What ends the conversation need not end a turn in the middle.
        closing, rest = until[until.rfind(words[1]) + len(words[1]) :], text[answer + len(words[1]) :]
        common = self._common(closing, rest) or (self._token_at(rest, 0) if closing else 0)
        return Surroundings(header, rest[:common])

    def _common(self, one: str, other: str) -> int:
        """Return how long the beginning is that two texts share, without a part of a special token."""
        end = len(commonprefix([one, other]))
        for token in self.template.tokens if end < len(one) else ():
            for begin in range(max(0, end - len(token) + 1), end):
                if one.startswith(token, begin) or other.startswith(token, begin):
                    return begin
        return end

    def _token_at(self, text: str, position: int) -> int:
        """Return the length of the special token at ``position``, 0 if there is none."""
        return max((len(token) for token in self.template.tokens if text.startswith(token, position)), default=0)

    def _words(self, conversation: Conversation, text: str) -> Mapping[int, Span] | None:
        """Return where the words of each message are, without white space around them; None if that cannot be told.

        Raises:
            RowFault: if a message is left out.
        """
        messages = conversation.messages
        unused = (first for first in _PLANES if not re.search(f"[{chr(first)}-{chr(first + _PLANE)}]", text))
        first = next(unused, None)
        if first is None or 2 * len(messages) > _PLANE:
            return None
        marked, expected = [], {}
        for number, message in enumerate(messages):
            # Marks stand around the words alone: templates trim messages, and would keep white space inside of marks.
            if core := message["content"].strip():
                between = f"{chr(first + 2 * number)}{core}{chr(first + 2 * number + 1)}"
                expected[number] = len(core)
                message = message | {"content": message["content"].replace(core, between, 1)}
            marked.append(message)
        written = self._rendered(marked, conversation.tools)
        pieces = re.split(f"([{chr(first)}-{chr(first + _PLANE)}])", written or "")
        # The marks have changed what is written (a template may look at how a message begins): they tell nothing.
        if "".join(pieces[::2]) != text:
            return None
        marks: dict[int, list[int]] = {}
        position = 0
        for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
            position += len(piece)
            marks.setdefault(ord(mark) - first, []).append(position)
        places: dict[int, Span] = {}
        for number, length in expected.items():
            begins, ends = marks.get(2 * number, []), marks.get(2 * number + 1, [])
            if not begins and not ends:
                raise _left_out(messages, number, self.template)
            # A message that is written twice has no place, and of one that is written in part the end is known.
            if len(ends) == 1:
                whole = len(begins) == 1 and ends[0] - begins[0] == length
                places[number] = begins[0] if whole else ends[0], ends[0]
        return places

    def _span(
        self, conversation: Conversation, text: str, turn: int, words: Mapping[int, Span] | None, after: int
    ) -> Span:
        """Return where a turn is in ``text``, behind ``after``, where the turn of the assistant before it ends."""
        messages, tools = conversation.messages, conversation.tools
        around = self.surroundings if words is not None else Surroundings()
        places = words or {}
        # The words of other messages are passed over: they may look like what the template writes.
        low = max(after, next((places[n][1] for n in reversed(range(turn)) if n in places), 0))
        high = next((places[n][0] for n in range(turn + 1, len(messages)) if n in places), len(text))
        own = places.get(turn)
        begin = end = -1
        if around.header:
            begin = text.rfind(around.header, low, own[0]) if own else text.find(around.header, low, high)
            begin += len(around.header) if begin >= 0 else 0
        # Where the template writes more than the header (an opening of thoughts), the prompt tells what of it asks.
        if begin < 0 or own is None or text[begin : own[0]].strip():
            asking = self._rendered(messages[:turn], tools, ask=True) or ""
            asked = self._common(asking, text)
            if asked and (asked == len(asking) or asked > begin >= 0):
                begin = asked
            elif begin < 0 and own and not text[low : own[0]].strip():
                begin = own[0]
        if turn == len(messages) - 1:
            end = len(text)
        elif around.closing and begin >= 0:
            end = text.find(around.closing, own[1] if own else begin, high)
            end += len(around.closing) if end >= 0 else 0
        if end < 0 and (until := self._rendered(messages[: turn + 1], tools)) and text.startswith(until):
            # Where nothing but the token that begins the next turn ends one, the model has to learn to stop by it.
            end = len(until) + (0 if self.surroundings.closing else self._token_at(text, len(until)))
        if end < 0 and own and not around.closing:
            end = own[1] + len(text[own[1] :]) - len(text[own[1] :].lstrip())
            end += self._token_at(text, end)
        if not 0 <= begin <= (own[1] if own else end) <= end or (end > high > begin):
            raise RowFault(
                f"message {turn + 1} (role 'assistant'): the chat template ({self.template.name}) writes it in a way "
                "in which it cannot be told apart from the rest; set data.train_on=all or another data.template, or "
                "mark answers in the template with {% generation %}"
            )
        return begin, end

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, ask: bool = False
    ) -> str | None:
        try:
            return self.template.render(messages, tools, ask=ask)
        except RowFault:
            return None

    def _check_complete(self, conversation: Conversation, text: str) -> None:
        """Raise ``RowFault`` if the template leaves a message out."""
        messages = conversation.messages
        for number, message in enumerate(messages):
            if not message["content"].strip() or message["content"].strip() in text:
                continue
            changed = [*messages[:number], message | {"content": _OTHER}, *messages[number + 1 :]]
            written = self._rendered(changed, conversation.tools)
            if written is not None and _OTHER not in written:
                raise _left_out(messages, number, self.template)


def _left_out(messages: Sequence[Message], number: int, template: ChatTemplate) -> RowFault:
    role = messages[number]["role"]
    return RowFault(
        f"message {number + 1} (role {role!r}) is left out by the chat template ({template.name}); set another "
        "data.template, or remove such messages"
    )


def _of_turns(generated: Sequence[Span], messages: Sequence[Message], turns: Sequence[int]) -> list[Span] | None:
    """Return the spans of ``turns``, None if marked spans and turns are not one to one."""
    assistant = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    joined: list[Span] = []
    for begin, end in generated:
        # A template may mark a turn in pieces (thoughts, then the answer). Pieces that touch are one
        # turn, unless there are as many marks as turns already: two answers may touch, too.
        if joined and joined[-1][1] == begin and len(generated) != len(assistant):
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    if len(joined) != len(assistant):
        return None
    return [joined[assistant.index(turn)] for turn in turns]
