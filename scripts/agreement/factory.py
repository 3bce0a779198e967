"""LLaMA-Factory's side: its own reading of rows, its templates, its labels.

Where a row differs, its template and the messages are changed step by step into ours: the smallest set of documented
changes that makes text and learned characters the same is the reason. If there is none, the difference is unknown.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any

from lt_offload.finetune.data.chat.conversations import Conversation
from lt_offload.finetune.data.chat.templates import Span
from lt_offload.finetune.data.formats import IGNORED, Example
from scripts.agreement.rows import Comparison, Rows

NAMES = {
    "smollm2-135m-instruct": "smollm2",
    "chatml": "chatml",
    "llama2": "llama2",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral:mistral-tekken": "ministral",
    "zephyr": "zephyr",
    "phi3": "phi",
    "gemma": "gemma",
}
"""LLaMA-Factory's names of our templates, some for one tokenizer only, and of those of tokenizers."""

INPUT = "instruction and input"
SYSTEM = "default system message"
FUNCTIONS = "words for functions"
NO_FUNCTIONS = "an empty list of functions"
ROLE = "role of results"
TRIMMED = "white space around messages"
BEGIN = "beginning of text"
INST = "space before [/INST]"
END = "spaces around answers"
LINES = "line breaks after </s>"
PIECES = "pieces by themselves"
EMPTY = "an empty answer"
LEFT_OUT = "turns that do not alternate"
DOCUMENTED = {
    INPUT: "LLaMA-Factory joins instruction and input by one line break, we by an empty line",
    SYSTEM: "LLaMA-Factory's default system message, where a conversation has none, is not that of the model's "
    "template (SmolLM2: the sentence ends otherwise; Zephyr: the template has none)",
    FUNCTIONS: "LLaMA-Factory describes functions, calls and results in words of its own; with ours in their places, "
    "the rows are the same",
    NO_FUNCTIONS: "LLaMA-Factory writes an empty system message where a row's list of functions is empty",
    ROLE: "LLaMA-Factory gives what functions return to the user where its template has no form for it (SmolLM2, "
    "Zephyr), the model's template to the role tool",
    TRIMMED: "the models' templates cut white space around messages, LLaMA-Factory keeps it",
    BEGIN: "LLaMA-Factory leaves out the token that begins a text where its template does not name it (ChatML, "
    "Zephyr), and in running text where the tokenizer has no setting add_bos_token, as those made here",
    INST: "LLaMA-Factory writes Mistral's questions as the tokenizers of v0.3 want them, without a space before "
    "[/INST], also for v0.1, whose template has one",
    END: "LLaMA-Factory writes no space between an answer of Llama 2 and </s>, the model's template does",
    LINES: "LLaMA-Factory writes no line break after </s> in Zephyr's turns, the model's template does",
    PIECES: "LLaMA-Factory tokenises each message by itself: where a tokenizer writes a space in front of a text, or "
    "joins characters across the border, its tokens are not those that the chat template gives as a whole",
    EMPTY: "LLaMA-Factory learns the token that ends an answer without words; we learn nothing from such an answer",
    LEFT_OUT: "LLaMA-Factory leaves out rows whose turns of user and assistant do not alternate",
}


_CALLS = ("function", "observation")
"""LLaMA-Factory's roles of calls and results."""
_MARK = "\U00100001"
"""A character that no template has."""


OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}
"""Keys and roles of messages in OpenAI's form."""
OUR_SLOTS: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "llama2": (END, {"format_assistant": [" {{content}} ", {"eos_token"}]}),
    "mistral": (INST, {"format_user": ["[INST] {{content}} [/INST]"]}),
    "zephyr": (
        LINES,
        {
            "format_user": ["<|user|>\n{{content}}", {"eos_token"}, "\n<|assistant|>\n"],
            "format_assistant": ["{{content}}", {"eos_token"}, "\n"],
            "format_system": ["<|system|>\n{{content}}", {"eos_token"}, "\n"],
        },
    ),
}
"""What the models' templates write where LLaMA-Factory's write something else."""
OUR_RESULTS: dict[str, list[Any]] = {
    "smollm2": ["<|im_start|>tool\n{{content}}<|im_end|>\n<|im_start|>assistant\n"],
    "zephyr": ["<|tool|>\n{{content}}", {"eos_token"}, "\n<|assistant|>\n"],
}
"""The same for results of functions."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What LLaMA-Factory's processor gets: its template, and one row in its form."""

    template: Any
    row: dict[str, Any]


Change = Callable[[Given], Given]


def compare(rows: Rows, template: str, result: Comparison) -> Comparison:
    """Fill ``result`` with how many rows LLaMA-Factory makes the same examples of.

    Args:
        rows: ours.
        template: LLaMA-Factory's name of the template.
        result: says which file and tokenizer.
    """
    side = Side(rows, template)
    for number, ours in enumerate(rows.examples):
        result.add(number + 1, ours, side.example(side.given[number]), partial(side.why, number))
    result.note = f"template {template}"
    return result


class Side:
    """LLaMA-Factory's code, with the tokenizer and the rows of a comparison."""

    def __init__(self, rows: Rows, template: str) -> None:
        data = importlib.import_module("llamafactory.data")
        converter = importlib.import_module("llamafactory.data.converter")
        parser = importlib.import_module("llamafactory.data.parser")
        self.processors = importlib.import_module("llamafactory.data.processor")
        self.formatter = importlib.import_module("llamafactory.data.formatter")
        self.rows = rows
        self.tokenizer: Any = copy.deepcopy(rows.data.tokenizer)
        self.arguments = SimpleNamespace(
            template=template, cutoff_len=1 << 30, packing=False, streaming=False, media_dir="",
            train_on_prompt=False, mask_history=False, tool_format=None, default_system=None,
            enable_thinking=True, preserve_thinking=False,
        )  # fmt: skip
        found = copy.deepcopy(data.template.TEMPLATES[template])
        found.fix_special_tokens(self.tokenizer)
        attributes = parser.DatasetAttr("file", "rows", **_attributes(rows))
        convert = converter.get_dataset_converter(attributes.formatting, attributes, self.arguments)
        self.given = [Given(template=found, row=convert(row)) for row in rows.rows]
        self.text = rows.layout.format == "text"

    def example(self, given: Given, *, characters: bool = False) -> Example | None:
        """Return what LLaMA-Factory makes of a row; None if it leaves the row out.

        Args:
            given: the row.
            characters: return the characters of the text in place of its tokens.
        """
        template = copy.copy(given.template)
        kind = "PretrainDatasetProcessor" if self.text else "SupervisedDatasetProcessor"
        made = getattr(self.processors, kind)(template, self.tokenizer, None, self.arguments)
        if characters:
            template._convert_elements_to_ids = lambda tokenizer, parts: list(_spelled(tokenizer, parts))
        found = made.preprocess_dataset({key: [value] for key, value in given.row.items()})
        if not found.get("input_ids"):
            return None
        [ids] = found["input_ids"]
        return Example(ids=ids, labels=found["labels"][0] if "labels" in found else list(ids))

    def why(self, number: int) -> list[str]:
        """Return the reasons why a row is not as ours, none if that is not known."""
        written, given = self.rows.written[number], self.given[number]
        if (theirs := self.example(given)) is None:
            return [LEFT_OUT] if not _alternates(self.rows.conversations[number]) else []
        if self.text:
            begun = [self.tokenizer.bos_token_id, *theirs.ids]
            return [BEGIN] if Example(ids=begun, labels=begun) == self.rows.examples[number] else []
        targets: list[tuple[Example, list[str]]] = [(_characters(written.text, written.learned), [])]
        if empty := self._with_empty_answers(number):
            targets.append((_characters(written.text, empty), [EMPTY]))
        changes = dict(self.changes(number))
        for count in range(len(changes) + 1):
            for reasons in itertools.combinations(changes, count):
                changed = given
                for reason in reasons:
                    changed = changes[reason](changed)
                made = self.example(changed, characters=True)
                for target, further in targets:
                    if made == target:
                        found = self.example(changed)
                        assert found is not None
                        ours = self.rows.examples[number]
                        apart = found.ids != ours.ids
                        if not apart and not further and found != ours:  # its labels are others for no known reason
                            return []
                        return [*reasons, *further, *([PIECES] if apart else [])]
        return []

    def _with_empty_answers(self, number: int) -> list[Span] | None:
        """Return where all answers of a row are, if some of them are empty."""
        conversation, locator = self.rows.conversations[number], self.rows.data.encoder.locator
        assert conversation is not None
        assert locator is not None
        answers = conversation.answers
        return locator.locate(conversation, answers)[1] if answers != conversation.learned(False) else None

    def changes(self, number: int) -> Iterator[tuple[str, Change]]:
        """Yield what is documented for a row, each with what makes ours of LLaMA-Factory's way."""
        conversation, given = self.rows.conversations[number], self.given[number]
        assert conversation is not None
        begin = self.tokenizer.bos_token
        if self.rows.layout.format == "alpaca":
            yield INPUT, lambda given: _with_question(given, conversation.messages[-2]["content"])
        if not given.row["_system"] and given.template.default_system != self.default_system:
            ours = self.default_system
            yield SYSTEM, lambda given: replace(given, template=_like(given.template, default_system=ours))
        if given.row["_tools"] == "[]":
            yield NO_FUNCTIONS, lambda given: replace(given, row=given.row | {"_tools": ""})
        turns = [*given.row["_prompt"], *given.row["_response"]]
        if given.row["_tools"] not in ("", "[]") or any(turn["role"] in _CALLS for turn in turns):
            yield FUNCTIONS, self._with_our_functions(conversation)
        slots = OUR_RESULTS.get(self.arguments.template)
        if slots is not None and any(message["role"] == "tool" for message in conversation.messages):
            yield ROLE, self._with(format_observation=slots)
        yield TRIMMED, _trimmed
        if begin is not None and self.rows.written[number].text.startswith(begin) and not _writes_begin(given.template):
            yield BEGIN, self._with(format_prefix=[{"bos_token"}])
        if self.arguments.template in OUR_SLOTS:
            reason, other = OUR_SLOTS[self.arguments.template]
            yield reason, self._with(**other)

    def _with(self, **slots: list[Any]) -> Change:
        """Return what gives the template other ``slots`` for some kinds of messages."""
        kinds = {"format_prefix": self.formatter.EmptyFormatter}
        formatters = {name: kinds.get(name, self.formatter.StringFormatter)(slots=each) for name, each in slots.items()}
        return lambda given: replace(given, template=_like(given.template, **formatters))

    @cached_property
    def default_system(self) -> str:
        """The system message that the chat template writes where there is none."""
        template = self.rows.data.encoder.template
        assert template is not None
        question = {"role": "user", "content": "question"}
        before, _, after = template.render([{"role": "system", "content": _MARK}, question]).partition(_MARK)
        plain = template.render([question])
        return plain[len(before) : -len(after)] if plain.startswith(before) and plain.endswith(after) else ""

    def _with_our_functions(self, conversation: Conversation) -> Change:
        template = self.rows.data.encoder.template
        assert template is not None
        messages = template.as_text(conversation).messages

        def change(given: Given) -> Given:
            turns, system = list(messages), given.row["_system"]
            if turns[0]["role"] == "system":
                system = turns.pop(0)["content"]
            turns = [
                {"role": {"tool": "observation"}.get(turn["role"], turn["role"]), "content": turn["content"]}
                for turn in turns
            ]
            parts = {"_prompt": turns[:-1], "_response": turns[-1:], "_system": system, "_tools": ""}
            return replace(given, row=given.row | parts)

        return change


def installed() -> bool:
    """Return whether LLaMA-Factory can be imported; what it needs for sounds and films need not be there."""
    for _ in range(10):
        try:
            importlib.import_module("llamafactory.data")
            return True
        except ModuleNotFoundError as error:
            missing = str(error.name)
            if missing.startswith("llamafactory"):
                return False
            sys.modules[missing] = ModuleType(missing)
            for loaded in [key for key in sys.modules if key.startswith("llamafactory")]:
                del sys.modules[loaded]
    return False


def _attributes(rows: Rows) -> dict[str, Any]:
    """Return the format of the rows in LLaMA-Factory's words."""
    columns = dict(rows.layout.columns)
    if rows.layout.format == "text":
        return {"prompt": columns["text"], "query": None, "response": None}
    if rows.layout.format == "alpaca":
        names = {"instruction": "prompt", "input": "query", "output": "response"}
        given = dict.fromkeys(("prompt", "query", "response"))
        return given | {names.get(role, role): column for role, column in columns.items()}
    if "role" in rows.rows[0][columns["messages"]][0]:
        return {"formatting": "sharegpt", **OPENAI, **columns}
    return {"formatting": "sharegpt", **columns}


def _characters(text: str, learned: Sequence[Span]) -> Example:
    """Return a text as if each character was a token."""
    places = {place for begin, end in learned for place in range(begin, end)}
    labels: list[Any] = [character if place in places else IGNORED for place, character in enumerate(text)]
    made: list[Any] = list(text)
    return Example(ids=made, labels=labels)


def _like(template: Any, **changed: Any) -> Any:
    other = copy.copy(template)
    for name, value in changed.items():
        setattr(other, name, value)
    return other


def _writes_begin(template: Any) -> bool:
    return any("bos_token" in slot for part in (template.format_prefix, template.format_user) for slot in part.slots)


def _spelled(tokenizer: Any, parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict):
            yield from part["token"]
        elif isinstance(part, set):
            [name] = part
            yield from getattr(tokenizer, name) or ""
        else:
            yield from part


def _with_question(given: Given, question: str) -> Given:
    *before, last = given.row["_prompt"]
    return replace(given, row=given.row | {"_prompt": [*before, last | {"content": question}]})


def _trimmed(given: Given) -> Given:
    parts = {
        part: [turn | {"content": turn["content"].strip()} for turn in given.row[part]]
        for part in ("_prompt", "_response")
    }
    return replace(given, row=given.row | parts | {"_system": given.row["_system"].strip()})


def _alternates(conversation: Conversation | None) -> bool:
    if conversation is None:
        return True
    roles = [message["role"] for message in conversation.messages if message["role"] != "system"]
    return len(roles) % 2 == 0 and all((role == "assistant") == bool(place % 2) for place, role in enumerate(roles))
