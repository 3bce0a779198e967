"""Rows of conversations, instructions and prompts as lists of messages, the way chat templates want them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lt_offload.finetune.data.columns import NEEDED, Columns
from lt_offload.finetune.data.rows import Row, RowFault, check_text, kind_of

Message = dict[str, Any]

_WORDS = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai", "bing"),
    "function_call": ("function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words}
"""Roles by the words that data have for them, in lower case."""
_KNOWN_ROLES = "system, developer, user (human), assistant (gpt, bot), function_call, tool (observation)"
_NAME_KEYS = "--data.columns '{role: KEY, content: KEY}'"
# Besides role and content: what templates of models that think look for, and OpenAI's weight of an answer.
_KEPT = ("name", "reasoning_content", "thinking", "reasoning", "weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages in OpenAI's form, and the functions that the assistant may call.

    Args:
        messages: each with a ``role``; ``content`` is text.
        tools: JSON schemas of functions.
        context: number of messages in front that are a prompt, and never learned.
    """

    messages: list[Message]
    tools: list[Message] | None = None
    context: int = 0

    @property
    def has_system(self) -> bool:
        """True if it begins with a system message."""
        return self.messages[0]["role"] in ("system", "developer")

    def with_system(self, system: str) -> Conversation:
        """Return the conversation with a system message in front."""
        messages = [{"role": "system", "content": system}, *self.messages]
        return replace(self, messages=messages, context=self.context + 1 if self.context else 0)

    @property
    def answers(self) -> list[int]:
        """The messages of the assistant after the prompt."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and i >= self.context]

    def learned(self, last_only: bool) -> list[int]:
        """Return the messages of the assistant that are learned: all with words in them, or only the last one.

        An empty answer would teach the model to say nothing, and a ``weight`` of 0 says that an answer is no example.
        """
        turns = self.answers
        return [i for i in (turns[-1:] if last_only else turns) if says_something(self.messages[i])]


def oddities(conversation: Conversation) -> list[str]:
    """Return notes on unusual features of a conversation, which may be mistakes in the data."""
    messages = [m for m in conversation.messages if m["role"] not in ("system", "developer")]
    roles = [message["role"] for message in messages]
    notes = []
    if roles[:1] == ["assistant"]:
        notes.append("a conversation begins with an answer, which nothing asks for")
    if any(one == other and one in ("user", "assistant") for one, other in itertools.pairwise(roles)):
        notes.append("two messages of one side follow each other")
    answers = [conversation.messages[number] for number in conversation.answers]
    if len(answers) > 1 and not all(a.get("weight", 1) == 0 or says_something(a) for a in answers):
        notes.append("one answer of several is empty")
    return notes


def says_something(message: Message) -> bool:
    """Return whether an answer has something to learn."""
    return bool(message.get("content", "").strip() or message.get("tool_calls")) and message.get("weight", 1) != 0


def from_row(row: Row, layout: Columns) -> Conversation:
    """Return the conversation in a row of messages, of a prompt and a completion, or of an instruction.

    Raises ``RowFault`` if it has none.
    """
    context = 0
    if layout.format == "alpaca":
        messages = _of_instruction(row, layout)
    else:
        columns = [layout.columns[role] for role in NEEDED[layout.format]]
        *prompt, answer = (
            parse_messages(layout.value(row, role), layout.columns[role], layout.keys) for role in NEEDED[layout.format]
        )
        # The answer must be in the completion: those in the prompt are context, and never learned.
        if not any(message["role"] == "assistant" for message in answer):
            raise RowFault(f"{columns[-1]} has no message of the assistant, so there is nothing to learn")
        context = sum(map(len, prompt))
        messages = [*itertools.chain(*prompt), *answer]
    conversation = Conversation(messages=messages, tools=_tools(row, layout), context=context)
    if not (system := layout.text(row, "system")):
        return conversation
    if conversation.has_system:
        raise RowFault(f"there are two system messages, in {layout.columns['system']} and in {columns[0]}")
    return conversation.with_system(system)


def with_prompt(row: Row, layout: Columns) -> Row:
    """Return a row of a pair with its prompt: what both answers begin with, if no column has it.

    Raises ``RowFault`` if an answer is missing, or neither text nor messages.
    """
    prompt, named = layout.value(row, "prompt"), layout.columns.get("prompt")
    if named is not None and not (layout.of_messages and isinstance(prompt, str)):
        return row
    columns = [layout.columns[role] for role in NEEDED["preference"]]
    values = [layout.value(row, role) for role in NEEDED["preference"]]
    check = partial(_listed, what="messages") if layout.of_messages else check_text
    chosen, rejected = answers = [check(value, column) for value, column in zip(values, columns, strict=True)]
    alike = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    alike = min(alike, len(chosen) - 1, len(rejected) - 1)
    if alike < 1 and named is not None:
        return {**row, named: [{"role": "user", "content": prompt}]}
    if alike > 0 and chosen[alike - 1] == " ":
        alike -= 1  # a space begins the word behind it
    split = {column: answer[max(alike, 0) :] for column, answer in zip(columns, answers, strict=True)}
    return {**row, **split, named or "prompt": chosen[: max(alike, 0)]}


def _of_instruction(row: Row, layout: Columns) -> list[Message]:
    messages: list[Message] = []
    for number, turn in enumerate(_listed(layout.value(row, "history"), "history", "pairs"), start=1):
        if not (isinstance(turn, Sequence) and len(turn) == 2 and not isinstance(turn, str)):
            raise RowFault(f"history: turn {number} is {kind_of(turn)}, not a pair of instruction and response")
        for role, part in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": check_text(part, f"history: turn {number}")})
    instruction, output = layout.text(row, "instruction"), layout.text(row, "output")
    added = layout.text(row, "input")
    question: Message = {"role": "user", "content": "\n\n".join(filter(None, (instruction, added)))}
    if instruction and added:
        # Stanford Alpaca's words have a place of its own for the input, which other templates do not know.
        question["input"] = added
    return [*messages, question, {"role": "assistant", "content": output}]


def parse_messages(value: Any, column: str, keys: Mapping[str, str] | None = None) -> list[Message]:
    """Return messages in OpenAI's form from ``value``, a list of those of OpenAI or ShareGPT, or JSON of one.

    ``keys`` names the keys that hold ``role`` and ``content``, if they are none of the usual ones, and ``column`` the
    place in errors. Raises ``RowFault`` if a message is none.
    """
    messages: list[Message] = []
    waiting: list[str] = []  # ids of calls that have no result yet
    if not (items := _listed(value, column, "messages")):
        raise RowFault(f"{column} is empty")
    for number, item in enumerate(items, start=1):
        try:
            message = _message(item, keys or {})
        except RowFault as fault:
            raise RowFault(f"{column}: message {number}: {fault}") from None
        if calls := message.get("tool_calls"):
            # Nine letters and digits: Mistral's templates refuse an id of any other length.
            waiting = [call.setdefault("id", f"call{place:05d}") for place, call in enumerate(calls)]
        elif message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        messages.append(message)
    return messages


def _message(item: Any, keys: Mapping[str, str]) -> Message:
    if not isinstance(item, Mapping):
        raise RowFault(f"is {kind_of(item)}, not an object with role and content")
    # OpenAI says role and content, ShareGPT from and value.
    role_key = keys.get("role") or ("from" if "from" in item and "role" not in item else "role")
    content_key = keys.get("content") or ("value" if "value" in item and role_key == "from" else "content")
    called = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else None)
    for key in (role_key,) if called else (role_key, content_key):
        if key not in item:
            has = ", ".join(map(repr, item)) or "nothing"
            raise RowFault(f"has no {key!r}, it has {has}; name its keys with {_NAME_KEYS}")
    name = check_text(item[role_key], role_key)
    role = _ROLES.get(name.lower())
    if role is None:
        raise RowFault(f"unknown role {name!r}; known are {_KNOWN_ROLES}")
    of_role = f"(role {name!r}) {content_key}"
    # ShareGPT's form of a call: a message of its own, whose text is JSON.
    if role == "function_call":
        calls = _json(check_text(item.get(content_key), of_role), of_role)
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": [_call(call, of_role) for call in calls]}
    if called is not None and role != "assistant":
        raise RowFault(f"(role {name!r}) has tool_calls, which only the assistant can make")
    message: Message = {"role": role, "content": _content(item.get(content_key), of_role, bool(called))}
    if called is not None:
        message["tool_calls"] = [_call(call, "tool_calls") for call in _listed(called, "tool_calls", "calls")]
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    for key in _KEPT:
        if item.get(key) is not None:
            message[key] = item[key] if key == "weight" else check_text(item[key], key)
    if message.get("weight", 1) not in (0, 1):
        raise RowFault(f"weight is {message['weight']!r}; it must be 0 or 1")
    return message


def _content(value: Any, name: str, may_be_missing: bool) -> str:
    if not isinstance(value, list | tuple):
        return "" if value is None and may_be_missing else check_text(value, name)
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            what = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise RowFault(f"{name} has a part that is not text ({what}); only text is learned")
        texts.append(check_text(part["text"], name))
    return "".join(texts)


def _call(call: Any, name: str) -> Message:
    """Return a call of a function in OpenAI's form, but with arguments as the object that chat templates expect."""
    function = _function(call, f"{name}: a call has no name of a function")
    where = f"{name}: arguments of {function['name']}"
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", where)
    if not isinstance(arguments, Mapping):
        raise RowFault(f"{where} are {kind_of(arguments)}, not an object")
    _check_json(arguments, where)
    made = {"name": check_text(function["name"], name), "arguments": dict(arguments)}
    return {"type": "function", "function": made} | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _tools(row: Row, layout: Columns) -> list[Message] | None:
    name, tools = layout.columns.get("tools", "tools"), []
    for each in _listed(layout.value(row, "tools"), name, "functions"):
        tool = _json(each, name) if isinstance(each, str) else each
        function = _function(tool, f"{name} has an entry that is no function with a name: {kind_of(tool)}")
        _check_json(tool, name)
        tools.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(function)})
    return tools or None


def _function(item: Any, fault: str) -> Mapping[str, Any]:
    """Return the function in ``item``, or that it is itself; raises ``RowFault`` if it has no name."""
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowFault(fault)
    return function


def _listed(value: Any, name: str, what: str) -> Sequence[Any]:
    """Return a list, or JSON of one, empty for nothing; an object is one of its items if they are functions."""
    if isinstance(value, str):
        value = _json(value, name) if value.strip() else None
    if isinstance(value, Mapping) and what == "functions":
        return [value]
    if not isinstance(value, list | tuple) and (value is not None or what in ("messages", "calls")):
        raise RowFault(f"{name} is {kind_of(value)}, not a list of {what}")
    return value or []


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"{name} is no JSON: {error}") from None


def _check_json(value: Any, name: str) -> None:
    try:
        check_text(json.dumps(value, ensure_ascii=False, default=str), name)
    except RecursionError:
        raise RowFault(f"{name} is nested too deeply") from None
