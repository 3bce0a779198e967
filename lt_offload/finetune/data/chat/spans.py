"""The assistant's words in the text of a conversation, to the character.

A template may say it itself (``{% generation %}``). For the others the text is compared with that of the same
conversation with marked or changed messages, so that templates which write earlier turns differently are understood,
too. A turn begins where the prompt that asks for it ends, and ends where the next message begins: the token that ends
it is learned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix

from lt_offload.finetune.data.chat.conversations import Conversation, Message
from lt_offload.finetune.data.chat.templates import ChatTemplate, Span
from lt_offload.finetune.data.rows import RowFault

_FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U000fffff]")
_MORE = {"tool_calls", "reasoning_content", "thinking", "reasoning"}
"""Keys of messages with more words than those of their content."""
_OTHER = "\U00100001"
"""A character that no text has, the content of changed messages."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The text of a template around the assistant's words, in a turn that is not the last.

    Args:
        header: text that asks for the turn.
        opening: text between the header and the words.
        closing: text that ends the turn.
        next_ends: whether nothing ends a turn but the token that begins the next one.
    """

    header: str = ""
    opening: str = ""
    closing: str = ""
    next_ends: bool = False


class Locator:
    """A search for the turns of the assistant in conversations of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def locate(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text of ``conversation``, and the spans of the assistant's messages ``turns`` in it.

        Raises:
            RowFault: if the template refuses it, leaves out a message, or cannot be understood.
        """
        messages = conversation.messages
        try:
            text, generated = self.template.render_with_spans(messages, conversation.tools)
        except RowFault as fault:
            raise self.template.blame(conversation, fault) from None
        # Checked with marks, too: a template with marks can leave out a message like any other.
        if generated is not None:
            self._check_complete(conversation, text)
            if (spans := _of_turns(generated, messages, turns)) is not None:
                return text, spans
        places = self._places(conversation, text)
        return text, [self._span(conversation, text, turn, places) for turn in turns]

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
            begin, end = self._compared(Conversation(messages=messages), text, 1, Surroundings())
        except RowFault:
            return Surroundings()
        header = text[len(before) : begin] if text.startswith(before) else ""
        start = text.find("answer", begin, end)
        if start < 0:
            return Surroundings(header)
        closing = text[start + len("answer") : end]
        return Surroundings(header, text[begin:start], closing, not closing and self._token_at(text, end) > 0)

    def _places(self, conversation: Conversation, text: str) -> dict[int, Span] | None:
        """Return the spans of the words of each message, without white space around them; None if they are unclear.

        Raises:
            RowFault: if a message is left out.
        """
        messages = conversation.messages
        # A message takes two of the 65,536 characters of the private plane that marks
        # are of. A text that has some of them already cannot be marked.
        if _MARKS.search(text) is not None or len(messages) > 30_000:
            return None
        marked = []
        expected = {}
        for number, message in enumerate(messages):
            content = message["content"]
            core = content.strip()
            # Marks stand around the words alone: templates trim messages, and would keep white space inside of marks.
            if core:
                begin, end = chr(_FIRST_MARK + 2 * number), chr(_FIRST_MARK + 2 * number + 1)
                left = len(content) - len(content.lstrip())
                content = f"{content[:left]}{begin}{core}{end}{content[left + len(core) :]}"
                expected[number] = len(core)
            marked.append(message | {"content": content})
        try:
            written = self.template.render(marked, conversation.tools)
        except RowFault:
            return None
        marks: dict[int, list[int]] = {}
        plain = []
        position = last = 0
        for mark in _MARKS.finditer(written):
            plain.append(written[last : mark.start()])
            position += mark.start() - last
            last = mark.end()
            marks.setdefault((ord(mark[0]) - _FIRST_MARK) // 2, []).append(position)
        # The marks have changed what is written (a template may look at how a message begins): they tell nothing.
        if "".join([*plain, written[last:]]) != text:
            self._check_complete(conversation, text)
            return None
        for number in expected:
            if number not in marks:
                raise _left_out(messages, number, self.template)
        # A message that is written twice, or in part, has no place.
        return {n: (at[0], at[1]) for n, at in marks.items() if len(at) == 2 and at[1] - at[0] == expected[n]}

    def _span(self, conversation: Conversation, text: str, turn: int, places: dict[int, Span] | None) -> Span:
        around = self.surroundings
        message = conversation.messages[turn]
        last = turn == len(conversation.messages) - 1
        if places is not None and turn in places and not _MORE & message.keys():
            begin, end = places[turn]
            core = message["content"].strip()
            left, right = message["content"].split(core, 1) if core else ("", "")
            # White space around the words is learned where the template has kept it, between what it writes itself.
            if left and text[:begin].endswith(around.header + around.opening + left):
                begin -= len(left)
            if text.startswith(right + around.closing, end):
                end += len(right)
            if text[:begin].endswith(around.header + around.opening) and around.header:
                begin -= len(around.opening)
                # Behind the last answer there is only what ends it, whatever the template writes there.
                if last:
                    return begin, len(text)
                if around.closing and text.startswith(around.closing, end):
                    return begin, end + len(around.closing)
        return self._compared(conversation, text, turn, around)

    def _compared(self, conversation: Conversation, text: str, turn: int, around: Surroundings) -> Span:
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
            if until is None:
                raise self._unclear(messages, turn)
            # What follows the words if nothing follows the turn, as far as it is written here as well.
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
