"""The assistant's words in the text of a conversation, to the character.

A template may say it itself (``{% generation %}``). For the others the text is compared with that of the same
conversation, shortened or with a changed message, so that templates which write earlier turns differently are
understood, too. A turn begins where the prompt that asks for it ends, and ends where the next message begins: the token
that ends it is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix

from lt_offload.finetune.data.conversations import Conversation, Message
from lt_offload.finetune.data.rows import RowFault
from lt_offload.finetune.data.templates import ChatTemplate, Span

_MARKS = 0xF0000
"""First of the characters that no text has, one for each message."""
_OTHER = "\U00100001"
"""A character that no text has, the content of changed messages."""
Tools = Sequence[Message] | None


class Locator:
    """A search for the turns of the assistant in conversations of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def locate(self, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text of ``conversation``, and the spans of the assistant's messages ``turns`` in it.

        Raises ``RowFault`` if the template refuses it, leaves out a message, or cannot be understood.
        """
        messages, tools = conversation.messages, conversation.tools
        try:
            text, generated = self.template.render_with_spans(messages, tools)
        except RowFault as fault:
            raise self.template.blame(conversation, fault) from None
        # A template that marks answers can leave out a message like any other.
        self._check_complete(messages, tools)
        if generated is not None and (spans := _of_turns(generated, messages, turns)) is not None:
            return text, spans
        return text, [self._span(messages, tools, turn, text) for turn in turns]

    @property
    def closing(self) -> str:
        """The text with which the template ends a turn of the assistant; empty where that cannot be told."""
        return self._around[1] or ""

    @cached_property
    def _around(self) -> tuple[str | None, str | None]:
        """The text that asks for a turn (None: nothing does), and that ends one which is not the last (None: unknown).

        Tried out with a conversation. An end that is empty is the beginning of the next turn.
        """
        words = (("user", "question"), ("assistant", "answer"), ("user", "another"), ("assistant", "final"))
        messages: list[Message] = [{"role": role, "content": content} for role, content in words]
        try:
            text = self.template.render(messages)
            before, asking = self.template.render(messages[:1]), self.template.render(messages[:1], ask=True)
            first, last = self._changed(messages, None, 1, text)
            closing = self._closing(messages, None, 1, text, last)
        except RowFault:
            return "", None
        if not closing and self._prefix(messages[:2], None, text) is None:
            closing = text[last : last + self._token_at(text, last)]
        if asking == before or not (text.startswith(before) and asking.startswith(before)):
            return None if asking == before else "", closing
        # The prompt may be longer than the conversation: it opens thoughts that are left out in earlier turns.
        return self._common(asking[len(before) :], text, len(before), first), closing

    def _span(self, messages: Sequence[Message], tools: Tools, turn: int, text: str) -> Span:
        """Return the span of a turn, from texts of shorter conversations, or of one with other words in the turn."""
        # If the text begins with that of the conversation up to this turn, the turn ends with it.
        begin = self._prefix(messages[:turn], tools, text, ask=True) if turn else None
        end = len(text) if turn == len(messages) - 1 else self._prefix(messages[: turn + 1], tools, text)
        if begin is not None and end is not None and begin < end:
            return begin, self._with_next(text, end)
        header, closing = self._around
        first, last = self._changed(messages, tools, turn, text)
        if begin is None:
            before = self._changed(messages, tools, turn - 1, text)[1] if turn else 0
            place = text.rfind(_first_line(header), before, first) if header else -1
            # Where nothing asks for a turn, white space in front of the words belongs to them.
            begin = first if header is not None else before + len(text[before:first].rstrip())
            if header and place >= 0:
                begin = place + len(self._common(header, text, place, first))
        if end is not None:
            end = self._with_next(text, end)
        else:
            own = self._closing(messages, tools, turn, text, last)
            end = last + len(self._common((closing or "") if own is None else own, text, last, len(text)))
            if end == last:
                end += self._token_at(text, end)
            # The next message would be learned: better no span than a wrong one.
            if self._changed(messages, tools, turn + 1, text)[0] < end:
                raise self._unclear(turn)
        # A span that does not hold the words themselves was found at the wrong place.
        if not begin <= first <= last <= end:
            raise self._unclear(turn)
        return begin, end

    def _with_next(self, text: str, end: int) -> int:
        """Return ``end``, behind the token that begins the next turn if nothing else ends one: it makes models stop."""
        return end + (self._token_at(text, end) if self._around[1] == "" else 0)

    def _prefix(self, messages: Sequence[Message], tools: Tools, text: str, *, ask: bool = False) -> int | None:
        """Return the length of the text of ``messages``; None if ``text`` does not begin with it."""
        written = self.template.tried(messages, tools, ask=ask)
        return len(written) if written is not None and text.startswith(written) else None

    def _closing(self, messages: Sequence[Message], tools: Tools, turn: int, text: str, last: int) -> str | None:
        """Return what follows the words of a turn if nothing follows the turn, as far as ``text`` has it at ``last``.

        None if a conversation cannot end so.
        """
        until = self.template.tried(messages[: turn + 1], tools)
        if until is None:
            return None
        # What ends the conversation is not what ends a turn in the middle.
        return self._common(until[self._changed(messages[: turn + 1], tools, turn, until)[1] :], text, last, len(text))

    def _common(self, whole: str, text: str, start: int, stop: int) -> str:
        """Return as much of ``whole`` as ``text`` has from ``start`` to ``stop``, without parts of special tokens."""
        common = commonprefix([whole, text[start:stop]])
        if common == whole:
            return common
        in_text = self._whole_tokens(text, start, start + len(common)) - start
        return common[: min(in_text, self._whole_tokens(whole, 0, len(common)))]

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

    def _changed(self, messages: Sequence[Message], tools: Tools, turn: int, text: str) -> Span:
        """Return the span of ``text`` that changes with the content of the message ``turn``."""
        message = messages[turn]
        others = [{key: value for key, value in message.items() if key != "tool_calls"} | {"content": _OTHER}]
        if message.get("tool_calls"):  # a result without a call may be refused, or written in another way
            others.append(message | {"tool_calls": [_changed_call(call) for call in message["tool_calls"]]})
        first, last = len(text), None
        for other in others:
            written = self.template.tried([*messages[:turn], other, *messages[turn + 1 :]], tools)
            if written is not None and _OTHER in written:
                same = len(commonprefix([text, written]))
                first = min(first, same)
                # Only behind the first difference: the two ends could overlap in a text that repeats itself.
                last = len(text) - len(commonprefix([text[same:][::-1], written[same:][::-1]]))
        if last is None:
            raise self._unclear(turn)
        return first, last

    def _check_complete(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise ``RowFault`` if the template leaves a message out."""
        marks = {number: chr(_MARKS + number) for number, each in enumerate(messages) if each["content"].strip()}
        marked = [message | {"content": marks.get(number, "")} for number, message in enumerate(messages)]
        written = self.template.tried(marked, tools)
        for number, mark in marks.items():
            if written is None or mark not in written:
                # A template may look at other contents, so that only a change of this one alone tells.
                alone = self.template.tried([*messages[:number], marked[number], *messages[number + 1 :]], tools)
                if alone is not None and mark not in alone:
                    raise RowFault(
                        f"message {number + 1} (role {messages[number]['role']!r}) is left out by the chat template "
                        f"({self.template.name}); set another data.template, or remove such messages"
                    )

    def _unclear(self, turn: int) -> RowFault:
        return RowFault(
            f"message {turn + 1} (role 'assistant'): the chat template ({self.template.name}) writes it in a way in "
            "which it cannot be told apart from the rest; set data.train_on=all or another data.template, or mark "
            "answers in the template with {% generation %}"
        )


def _first_line(text: str) -> str:
    """Return ``text`` up to the end of the first line with something in it."""
    return text[: len(text) - len(text.lstrip())] + text.lstrip().partition("\n")[0]


def _changed_call(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    other = f'{{"{_OTHER}": "{_OTHER}"}}' if isinstance(arguments, str) else {_OTHER: _OTHER}
    return call | {"function": call["function"] | {"arguments": other}}


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
    return [joined[assistant.index(turn)] for turn in turns] if len(joined) == len(assistant) else None
