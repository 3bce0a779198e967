"""Rows of conversations, instructions and prompts as lists of messages, the way chat templates want them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lt_offload.finetune.data.columns import Columns
from lt_offload.finetune.data.rows import Row, RowFault, check_text, kind_of

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "bing": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Roles by the words that data have for them, in lower case."""
_KNOWN_ROLES = "system, developer, user (human), assistant (gpt, bot), function_call, tool (observation)"
_NAME_KEYS = "--data.columns '{role: KEY, content: KEY}'"
_PAIR = ("instruction", "output")
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


def from_chat(row: Row, layout: Columns, *, from_table: bool) -> Conversation:
    """Return the conversation in a row with messages.

    Args:
        row: see ``layout``.
        layout: columns of its parts.
        from_table: whether it comes from a table, in which a missing key is null.

    Raises:
        RowFault: if it has none.
    """
    column = layout.columns["messages"]
    messages = parse_messages(row.get(column), column, layout.keys, from_table=from_table)
    if not any(message["role"] == "assistant" for message in messages):
        raise RowFault(f"{column} has no message of the assistant, so there is nothing to learn")
    system = _optional(row, layout, "system")
    if system:
        if messages[0]["role"] in ("system", "developer"):
            raise RowFault(f"there are two system messages, in {layout.columns['system']} and in {column}")
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages=messages, tools=_tools(row, layout, from_table))


def from_alpaca(row: Row, layout: Columns) -> Conversation:
    """Return the conversation of an instruction with a response.

    Raises:
        RowFault: if one of them is no text.
    """
    instruction, output = (check_text(_get(row, layout, role), layout.columns[role]) for role in _PAIR)
    messages: list[Message] = []
    if system := _optional(row, layout, "system"):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_history(row, layout), start=1):
        if not (isinstance(turn, Sequence) and len(turn) == 2 and not isinstance(turn, str)):
            raise RowFault(f"history: turn {number} is {kind_of(turn)}, not a pair of instruction and response")
        question, answer = (check_text(part, f"history: turn {number}") for part in turn)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = "\n\n".join(part for part in (instruction, _optional(row, layout, "input")) if part)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return Conversation(messages=messages)


def from_completion(row: Row, layout: Columns, *, from_table: bool) -> Conversation:
    """Return the conversation of a prompt and a completion that are lists of messages.

    Raises:
        RowFault: if one of them is none.
    """
    prompt, completion = (
        parse_messages(row[layout.columns[role]], layout.columns[role], layout.keys, from_table=from_table)
        for role in ("prompt", "completion")
    )
    # The answer must be in the completion: those in the prompt are context, and never learned.
    if not any(message["role"] == "assistant" for message in completion):
        raise RowFault(f"{layout.columns['completion']} has no message of the assistant, so there is nothing to learn")
    tools = _tools(row, layout, from_table)
    return Conversation(messages=prompt + completion, tools=tools, context=len(prompt))


def parse_messages(
    value: Any, column: str, keys: Mapping[str, str] | None = None, *, from_table: bool = False
) -> list[Message]:
    """Return messages in OpenAI's form from those of OpenAI or ShareGPT.

    Args:
        value: a list, or JSON of one.
        column: its name, for errors.
        keys: names of the keys that hold ``role`` and ``content``, if they are none of the usual ones.
        from_table: whether a missing key is null.

    Raises:
        RowFault: if a message is none.
    """
    if isinstance(value, str):
        value = _json(value, column)
    if not isinstance(value, list | tuple):
        raise RowFault(f"{column} is {kind_of(value)}, not a list of messages")
    if not value:
        raise RowFault(f"{column} is empty")
    messages: list[Message] = []
    calls: list[str] = []
    for number, item in enumerate(value, start=1):
        try:
            message = _message(item, keys or {}, from_table)
        except RowFault as fault:
            raise RowFault(f"{column}: message {number}: {fault}") from None
        _link(message, calls)
        messages.append(message)
    return messages


def _message(item: Any, keys: Mapping[str, str], from_table: bool) -> Message:
    if not isinstance(item, Mapping):
        raise RowFault(f"is {kind_of(item)}, not an object with role and content")
    # OpenAI says role and content, ShareGPT from and value. A row of a table has the keys of
    # all others, too, with null in them, so that a key that is there proves nothing.
    role_key = keys.get("role") or ("role" if item.get("role") is not None or "from" not in item else "from")
    content_key = keys.get("content") or ("content" if "content" in item and role_key != "from" else "value")
    if "content" not in item and "value" not in item:
        content_key = keys.get("content", "content")
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
        if not isinstance(called, list | tuple):
            raise RowFault(f"tool_calls is {kind_of(called)}, not a list")
        message["tool_calls"] = [_call(_dense(call) if from_table else call, "tool_calls") for call in called]
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    for key in _KEPT:
        if item.get(key) is not None:
            message[key] = item[key] if key == "weight" else check_text(item[key], key)
    if message.get("weight", 1) not in (0, 1):
        raise RowFault(f"weight is {message['weight']!r}; it must be 0 or 1")
    return message


def _content(value: Any, name: str, may_be_missing: bool) -> str:
    if value is None and may_be_missing:
        return ""
    if not isinstance(value, list | tuple):
        return check_text(value, name)
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            what = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise RowFault(f"{name} has a part that is not text ({what}); only text is learned")
        texts.append(check_text(part["text"], name))
    return "".join(texts)


def _call(call: Any, name: str) -> Message:
    """Return a call of a function in OpenAI's form, but with arguments as the object that chat templates expect."""
    if not isinstance(call, Mapping):
        raise RowFault(f"{name}: a call is {kind_of(call)}, not an object with name and arguments")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowFault(f"{name}: a call has no name of a function")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"{name}: arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise RowFault(f"{name}: arguments of {function['name']} are {kind_of(arguments)}, not an object")
    _check_json(arguments, f"{name}: arguments of {function['name']}")
    made: Message = {
        "type": "function",
        "function": {"name": check_text(function["name"], name), "arguments": dict(arguments)},
    }
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _link(message: Message, calls: list[str]) -> None:
    """Give calls without an id one, of the form that the strictest templates want, and results the ids of their calls.

    ``calls`` are the ids of those that have no result yet.
    """
    if message.get("tool_calls"):
        calls.clear()
        # Nine letters and digits: Mistral's templates refuse an id of any other length.
        for number, call in enumerate(message["tool_calls"]):
            calls.append(call.setdefault("id", f"call{number:05d}"))
    elif message["role"] == "tool" and calls:
        first = calls.pop(0)
        message.setdefault("tool_call_id", first)


def _tools(row: Row, layout: Columns, from_table: bool) -> list[Message] | None:
    value = _get(row, layout, "tools")
    name = layout.columns.get("tools", "tools")
    if isinstance(value, str):
        value = _json(value, name) if value.strip() else None
    if value is None or value == []:
        return None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise RowFault(f"{name} is {kind_of(value)}, not a list of functions")
    tools = []
    for tool in value:
        if isinstance(tool, str):
            tool = _json(tool, name)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowFault(f"{name} has an entry that is no function with a name: {kind_of(tool)}")
        _check_json(tool, name)
        tool = _dense(tool) if from_table else dict(tool)
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _history(row: Row, layout: Columns) -> Sequence[Any]:
    value = _get(row, layout, "history")
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = _json(value, "history")
    if not isinstance(value, list | tuple):
        raise RowFault(f"history is {kind_of(value)}, not a list of pairs")
    return value


def _get(row: Row, layout: Columns, role: str) -> Any:
    column = layout.columns.get(role)
    if column is None:
        return None
    if column not in row and role in ("instruction", "output"):
        raise RowFault(f"{column} is missing")
    return row.get(column)


def _optional(row: Row, layout: Columns, role: str) -> str:
    value = _get(row, layout, role)
    return "" if value is None else check_text(value, layout.columns[role])


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


def _dense(value: Any) -> Any:
    """Return ``value`` without the keys that are null because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list) else value
