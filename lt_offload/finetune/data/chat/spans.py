"""The assistant's words in the text of a conversation, to the character.

A template may say it itself (``{% generation %}``). For the others the text is compared with that of the same
conversation, shortened or with a changed message, so that templates which write earlier turns differently are
understood, too. A turn begins where the prompt that asks for it ends, and ends where the next message begins: the token
that ends it is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix

from lt_offload.finetune.data.chat.conversations import Conversation, Message
from lt_offload.finetune.data.chat.templates import ChatTemplate, Span
from lt_offload.finetune.data.rows import RowFault

_MARKS = 0xF0000
"""First of the characters that no text has, one for each message."""
_OTHER = "\U00100001"
"""A character that no text has, the content of changed messages."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The text of a template around the assistant's words, in a turn that is not the last."""

    header: str = ""
    """Text that asks for the turn."""
    opening: str = ""
    """Text between the header and the words."""
    closing: str = ""
    next_ends: bool = False
    """True if nothing ends a turn but the token that begins the next one."""


class Locator:
    """A search for the turns of the assistant in conversations of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def locate(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text of ``conversation``, and the spans of the assistant's messages ``turns`` in it.

        Raises ``RowFault`` if the template refuses it, leaves out a message, or cannot be understood.
        """
        messages = conversation.messages
        try:
            text, generated = self.template.render_with_spans(messages, conversation.tools)
        except RowFault as fault:
            raise self.template.blame(conversation, fault) from None
        # A template that marks answers can leave out a message like any other.
        self._check_complete(conversation)
        if generated is not None and (spans := _of_turns(generated, messages, turns)) is not None:
            return text, spans
        return text, [self._span(conversation, text, turn, self.surroundings) for turn in turns]

    @property
    def closing(self) -> str:
        """The text with which the template ends a turn of the assistant; empty where that cannot be told."""
        return self.surroundings.closing

    @cached_property
    def surroundings(self) -> Surroundings:
        """The text that the template writes around a turn, tried out; empty where that cannot be told."""
        messages: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer"},
            {"role": "user", "content": "another"},
            {"role": "assistant", "content": "final"},
        ]
        try:
            before, text = self.template.render(messages[:1]), self.template.render(messages)
            # The first answer, which others follow: the last one of a conversation may be written in another way.
            begin, end = self._span(Conversation(messages=messages), text, 1, Surroundings())
        except RowFault:
            return Surroundings()
        header = text[len(before) : begin] if text.startswith(before) else ""
        start = text.find("answer", begin, end)
        if start < 0:
            return Surroundings(header)
        closing = text[start + len("answer") : end]
        return Surroundings(header, text[begin:start], closing, not closing and self._token_at(text, end) > 0)

    def _span(self, conversation: Conversation, text: str, turn: int, around: Surroundings) -> Span:
        """Return the span of a turn, from texts of shorter conversations, or of one with other words in the turn."""
        messages, tools = conversation.messages, conversation.tools
        begin = self._asked(messages, tools, turn, text) if turn else None
        end = len(text) if turn == len(messages) - 1 else None
        until = None
        if end is None:
            # If the text begins with that of the conversation up to this turn, the turn
            # ends with it. Where nothing but the beginning of the next turn ends one, its
            # token belongs to this one: the model has to learn to stop.
            until = self._rendered(messages[: turn + 1], tools)
            if until is not None and text.startswith(until) and len(until) > (begin or 0):
                end = len(until) + (self._token_at(text, len(until)) if around.next_ends else 0)
        if begin is not None and end is not None:
            return begin, end
        words = self._changed(messages, tools, turn, text)
        if begin is None and turn:
            begin = self._partly_asked(messages, tools, turn, text, words[0])
        if begin is None:
            before = self._changed(messages, tools, turn - 1, text)[1] if turn else 0
            header = text.rfind(around.header, before, words[0]) if around.header else -1
            begin = header + len(around.header) if header >= 0 else words[0]
            if header < 0 and around.opening and text.endswith(around.opening, before, words[0]):
                begin -= len(around.opening)
        if end is None:
            # What follows the words if nothing follows the turn, as far as it is written here as well.
            closing = around.closing
            if until is not None:
                closing = until[self._changed(messages[: turn + 1], tools, turn, until)[1] :]
            common = commonprefix([closing, text[words[1] :]])
            if len(common) < len(closing):  # what ends the conversation is not what ends a turn in the middle
                common = common[: self._whole_tokens(text, words[1], words[1] + len(common)) - words[1]]
            end = words[1] + len(common)
            if not common:
                end += self._token_at(text, end)
            # The next message would be learned: better no span than a wrong one.
            if self._changed(messages, tools, turn + 1, text)[0] < end:
                raise self._unclear(messages, turn)
        # A span that does not hold the words themselves was found at the wrong place.
        if not begin <= words[0] <= words[1] <= end:
            raise self._unclear(messages, turn)
        return begin, end

    def _asked(self, messages: Sequence[Message], tools: Sequence[Message] | None, turn: int, text: str) -> int | None:
        """Return the end of the prompt that asks for a turn in ``text``, None if ``text`` does not begin with it."""
        asking = self._rendered(messages[:turn], tools, ask=True)
        return len(asking) if asking is not None and text.startswith(asking) else None

    def _partly_asked(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, turn: int, text: str, words: int
    ) -> int | None:
        """Return the end of the common part of a prompt and ``text``, before ``words``, if earlier turns are the same.

        The prompt may be longer than the conversation: it opens thoughts that are left out in earlier turns.
        """
        before, asking = self._rendered(messages[:turn], tools), self._rendered(messages[:turn], tools, ask=True)
        if before is None or asking is None or not (asking.startswith(before) and text.startswith(before)):
            return None
        start = len(before)
        end = min(start + len(commonprefix([asking[start:], text[start:]])), words)
        return min(self._whole_tokens(text, start, end), self._whole_tokens(asking, start, end))

    def _token_at(self, text: str, position: int) -> int:
        """Return the length of the special token at ``position``, 0 if there is none."""
        return max((len(token) for token in self.template.tokens if text.startswith(token, position)), default=0)

    def _whole_tokens(self, text: str, start: int, end: int) -> int:
        """Return ``end``, or the beginning of a special token that lies on both sides of it."""
        for token in self.template.tokens:
            for begin in range(max(start, end - len(token) + 1), end):
                if text.startswith(token, begin):
                    return begin
        return end

    def _changed(self, messages: Sequence[Message], tools: Sequence[Message] | None, turn: int, text: str) -> Span:
        """Return the span of ``text`` that changes with the content of the message ``turn``."""
        message = messages[turn]
        others = [{key: value for key, value in message.items() if key != "tool_calls"} | {"content": _OTHER}]
        if message.get("tool_calls"):  # a result without a call may be refused, or written in another way
            others.append(message | {"tool_calls": [_changed_call(call) for call in message["tool_calls"]]})
        first, last = len(text), None
        for other in others:
            written = self._rendered([*messages[:turn], other, *messages[turn + 1 :]], tools)
            if written is not None and _OTHER in written:
                same = len(commonprefix([text, written]))
                first = min(first, same)
                # Only behind the first difference: the two ends could overlap in a text that repeats itself.
                last = len(text) - len(commonprefix([text[same:][::-1], written[same:][::-1]]))
        if last is None:
            raise self._unclear(messages, turn)
        return first, last

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, ask: bool = False
    ) -> str | None:
        try:
            return self.template.render(messages, tools, ask=ask)
        except RowFault:
            return None

    def _check_complete(self, conversation: Conversation) -> None:
        """Raise ``RowFault`` if the template leaves a message out."""
        messages, tools = conversation.messages, conversation.tools
        marks = {number: chr(_MARKS + number) for number, each in enumerate(messages) if each["content"].strip()}
        written = self._rendered(
            [message | {"content": marks.get(number, "")} for number, message in enumerate(messages)], tools
        )
        for number, mark in marks.items():
            if written is None or mark not in written:
                # A template may look at other contents, so that only a change of this one alone tells.
                changed = [*messages[:number], messages[number] | {"content": mark}, *messages[number + 1 :]]
                alone = self._rendered(changed, tools)
                if alone is not None and mark not in alone:
                    raise _left_out(messages, number, self.template)

    def _unclear(self, messages: Sequence[Message], turn: int) -> RowFault:
        return RowFault(
            f"message {turn + 1} (role 'assistant'): the chat template ({self.template.name}) writes it in a way in "
            "which it cannot be told apart from the rest; set data.train_on=all or another data.template, or mark "
            "answers in the template with {% generation %}"
        )


def _changed_call(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    other = f'{{"{_OTHER}": "{_OTHER}"}}' if isinstance(arguments, str) else {_OTHER: _OTHER}
    return call | {"function": call["function"] | {"arguments": other}}


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
