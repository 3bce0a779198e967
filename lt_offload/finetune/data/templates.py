"""Chat templates: the tokenizer's own, a shipped one or a file; functions that one cannot write become text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.compat.hugging_face import compile_template
from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.conversations import Conversation, Message
from lt_offload.finetune.data.rows import RowFault
from lt_offload.resources import is_file, shipped_files, user_path
from lt_offload.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
OWN = "the tokenizer's"
"""Name of the template that a tokenizer brings."""

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "phi3": "<|end|>", "gemma": "<end_of_turn>"}
"""Shipped templates whose turns end with another token than the text."""
TOOLS_AS_TEXT = (
    "the chat template has no place for functions: they are described in the system message, and calls are JSON "
    "between <tool_call> and </tool_call>"
)
_TOOLS = (
    "These functions can be called:\n<tools>\n{tools}\n</tools>\n"
    "A call is a JSON object with the keys name and arguments between <tool_call> and </tool_call>."
)


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A chat template in Jinja, and ``tool_text`` for conversations with tools, where that is another one.

    ``special`` tokens are the tokenizer's by their names; ``tokens`` are texts that are one token wherever they stand.
    """

    name: str
    text: str
    special: Mapping[str, str]
    tokens: Sequence[str]
    tool_text: str | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, ask: bool = False) -> str:
        """Return the text of a conversation; with ``ask``, of one that the assistant is to go on with.

        Raises ``RowFault`` if the template refuses it.
        """
        return self.render_with_spans(messages, tools, ask=ask)[0]

    def render_with_spans(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, ask: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text, and the spans of the assistant's words in it if the template marks them.

        Raises ``RowFault`` if the template refuses the conversation.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.tool_text or self.text if tools else self.text
        special: Mapping[str, Any] = self.special
        marked = _MARKERS.search(text) is not None
        try:
            # transformers' own renderer, with its filters and functions, as templates are written for it.
            rendered: Any = render_jinja_template(
                [list(messages)],
                list(tools) if tools else None,
                chat_template=text,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=ask,
                **special,
            )
        # Templates call methods of what they are given, so a message of a
        # kind that they do not expect is any of these.
        except (
            TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
            MemoryError,
        ) as error:  # fmt: skip
            raise RowFault(f"the chat template ({self.name}) refuses it: {first_line(error)}") from error
        return rendered[0][0], rendered[1][0] if marked else None

    def tried(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, ask: bool = False
    ) -> str | None:
        """Return the text of a conversation, None if the template refuses it."""
        try:
            return self.render(messages, tools, ask=ask)
        except RowFault:
            return None

    def blame(self, conversation: Conversation, fault: RowFault) -> RowFault:
        """Return ``fault`` with the first message that the template refuses."""
        messages, tools = conversation.messages, conversation.tools
        # A template stops without saying where: the shortest beginning of the
        # conversation that it refuses ends with the message to blame.
        for number in range(1, len(messages) + 1):
            if self.tried(messages[:number], tools) is None:
                of_tools = self.tried(messages[:number]) is not None
                where = "tools" if of_tools else f"message {number} (role {messages[number - 1]['role']!r})"
                return RowFault(f"{where}: {fault}")
        return fault

    def fit(self, conversation: Conversation) -> tuple[Conversation, str | None]:
        """Return ``conversation`` in a form that this template can write, and a note if functions became text."""
        messages = conversation.messages
        # A template that does not name this role refuses it or leaves it out.
        if "developer" not in self.text and any(message["role"] == "developer" for message in messages):
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            conversation = replace(conversation, messages=messages)
        tools, results = bool(conversation.tools), any(message["role"] == "tool" for message in messages)
        calls = any(message.get("tool_calls") for message in messages)
        if not (tools or calls or results) or _writes(self, tools, "object" if calls else None, results):
            return conversation, None
        if calls and _writes(self, tools, "text", results):
            return replace(conversation, messages=[_with_text_arguments(message) for message in messages]), None
        return self.as_text(conversation), TOOLS_AS_TEXT

    def as_text(self, conversation: Conversation) -> Conversation:
        """Return ``conversation`` with functions, calls and results as text in its messages."""
        messages = [dict(message) for message in conversation.messages]
        # Tried without calls, which are text in what will be written.
        as_user = not _writes(self, False, None, True)
        for message in messages:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls", None) or ()]
            texts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            message["content"] = "\n".join(filter(None, texts))
            if message["role"] == "tool" and as_user:
                message["role"] = "user"
                message["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
        made = Conversation(messages=messages, context=conversation.context)
        if not conversation.tools:
            return made
        listed = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools))
        if not made.has_system:
            return made.with_system(listed)
        messages[0]["content"] += f"\n\n{listed}"
        return made


@cache
def _writes(template: ChatTemplate, tools: bool, calls: Literal["object", "text"] | None, results: bool) -> bool:
    """Return whether ``template`` writes functions, calls with arguments in that form, and results, by trying."""
    # No template writes words with a 7 of itself: those that are there were handed through.
    parameters = {"type": "object", "properties": {"key7": {"type": "string", "description": "some text"}}}
    function = {"name": "tool7", "description": "some function", "parameters": parameters}
    call = {"type": "function", "id": "call00007", "function": {"name": "name7", "arguments": {"key7": "value7"}}}
    result = {"role": "tool", "content": "result7", "tool_call_id": "call00007", "name": "name7"}
    answer: Message = {"role": "assistant", "content": "answer"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]} if calls else answer
    messages: list[Message] = [{"role": "user", "content": "question"}]
    messages += [_with_text_arguments(calling) if calls == "text" else calling, *([result, answer] if results else [])]
    written = template.tried(messages, [{"type": "function", "function": function}] if tools else None) or ""
    if (tools and "tool7" not in written) or (results and "result7" not in written):
        return False
    # A template that wants text prints an object in Python's way, which no model has been trained on.
    as_object = "value7" in written and "{'key7'" not in written
    return bool(written) and {None: True, "object": as_object, "text": '{"key7": "value7"}' in written}[calls]


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


def find_template(setting: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[ChatTemplate | None, list[str]]:
    """Return the chat template that ``data.template`` names, and notes for the user.

    Null is the tokenizer's own, if it has one. Raises ``ConfigError`` if there is no such template, or it is no Jinja.
    """
    from jinja2 import TemplateSyntaxError

    notes: list[str] = []
    name, tool_text = setting or OWN, None
    shipped = shipped_files("configs/templates", ".jinja")
    if setting is None:
        text: Any = tokenizer.chat_template
        if isinstance(text, dict):
            text, tool_text = text.get("default"), text.get("tool_use")
            if text is None:
                names = ", ".join(tokenizer.chat_template)
                raise ConfigError(f"the tokenizer has chat templates {names}, none is the default; set data.template")
        if not text:
            return None, []
    elif setting in shipped:
        text, notes = _adapted(setting, shipped[setting].read_text(encoding="utf-8"), tokenizer)
    elif is_file(file := user_path(setting)):
        name = file.name
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template={setting!r} is not UTF-8 text: {error}") from None
    else:
        hint = did_you_mean(setting, shipped, most=1) or f"; shipped are {', '.join(shipped)}"
        raise ConfigError(f"data.template={setting!r} is neither a shipped chat template nor a file{hint}")
    for each in filter(None, (text, tool_text)):
        try:
            compile_template(each)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template {name}: line {error.lineno}: {error.message}") from None
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return ChatTemplate(name, text, special, tuple(tokenizer.added_tokens_encoder), tool_text), notes


def _adapted(name: str, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    """Return a shipped template with the tokens that ``tokenizer`` has, and notes on the changes."""
    notes = []
    vocabulary, end = tokenizer.get_vocab(), _END_OF_TURN.get(name)
    if end is not None and end not in vocabulary and tokenizer.eos_token is not None:
        text = text.replace(end, str(tokenizer.eos_token))
        notes.append(
            f"data.template={name}: this tokenizer has no token {end}, turns end with {tokenizer.eos_token} instead"
        )
    if name == "mistral" and "[INST]" in tokenizer.added_tokens_encoder:
        # Since v0.3 the marks are tokens; those of Tekken, which has no spaces of SentencePiece's, stand without any.
        text = text.replace(" [/INST]", "[/INST]")
        if "▁" not in vocabulary:
            text = text.replace("[INST] ", "[INST]").replace("' ' + message['content']", "message['content']")
    written = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    tags = {f"<{tag}>" for tag in re.findall(r"</(\w+)>", text)}  # of XML, with an end for each beginning
    tokens = sorted(set(re.findall(r"<\|?\w+\|?>", written)) - vocabulary.keys() - tags)
    if tokens:
        notes.append(
            f"data.template={name}: this tokenizer has no token for {', '.join(tokens)}; they are split like other text"
        )
    begin = tokenizer.bos_token_id
    # Texts get this token from the tokenizer, conversations from the template alone: without it
    # here, training would begin with another token than the model has ever begun with.
    if begin is not None and "bos_token" not in text and tokenizer("a")["input_ids"][:1] == [begin]:
        text = "{{- bos_token }}" + text
    return text, notes
