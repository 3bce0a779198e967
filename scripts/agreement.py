"""Compares tokens, masks and packing with TRL and LLaMA-Factory, token for token, where they are installed.

    python -m scripts.agreement FILE... [--tokenizer smollm2-135m-instruct chatml:FOLDER] [--rows 200] [--save a.json]

``NAME:FOLDER`` is a tokenizer with one of our chat templates. Both get the messages that we have made of a row: what is
compared is the text, the tokens, what is learned, and which rows share a sequence. TRL prepares rows with its trainer's
own code; of conversations, each answer is the completion of what comes before it. Prints a table and what is known to
differ (``DOCUMENTED``); exits with 1 if a row differs from TRL's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.batches.documents import Documents
from lt_offload.finetune.data.batches.packing import packed, pieces_of
from lt_offload.finetune.data.chat.conversations import Conversation, from_alpaca, from_chat, from_completion
from lt_offload.finetune.data.columns import Columns
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.data.rows import Row, RowFault

SYSTEM = "You answer questions."
"""For LLaMA-Factory, whose default system messages are not always those of the models."""
LENGTH = 1024
"""Of packed sequences."""
DOCUMENTED = {
    "an empty answer": "we learn nothing from it, TRL and LLaMA-Factory the token that ends it",
    "line break before <tool_call>": "LLaMA-Factory writes calls with its own words; compare rows without functions",
    "merged at the boundary": "TRL learns from where tokens of prompt and whole differ, we from the answer's first",
    "system message": "LLaMA-Factory has default system messages of its own; both get one here",
    "beginning of text": "LLaMA-Factory writes no <s> in chatml, zephyr and phi; it is not compared there",
    "messages by themselves": "LLaMA-Factory tokenises each message by itself: where a tokenizer puts a space in front "
    "of a text (Llama 2, Mistral 7B, Phi-3), its tokens are not those of the chat template",
    "end of zephyr's turns": "LLaMA-Factory leaves out the line break after </s> that the model's template has",
    "instruction and input": "LLaMA-Factory joins them with one line break, we with an empty line; both get ours here",
}
_FACTORY = {
    "smollm2-135m-instruct": "smollm2",
    "chatml": "chatml",
    "llama3": "llama3",
    "zephyr": "zephyr",
    "phi3": "phi",
}
"""LLaMA-Factory's name of a template."""


@dataclass(kw_only=True)
class Result:
    """How many rows are the same."""

    file: str
    tokenizer: str
    against: str
    rows: int = 0
    same: int = 0
    differ: list[str] = field(default_factory=list)
    """The first rows that differ, and how."""
    note: str = ""


def main() -> int:
    """Compare, print and save; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--rows", type=int, default=200, help="of each file")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    results = [result for name in asked.tokenizer for file in asked.files for result in compare(file, name, asked.rows)]
    for each in results:
        where = f"{Path(each.file).name:32} {each.tokenizer:28} {each.against:34}"
        print(f"{where} {each.same:>5} of {each.rows:>5} {each.note}")
        for line in each.differ:
            print(f"    {line}")
    print("Where they may differ:")
    for what, why in DOCUMENTED.items():
        print(f"  {what}: {why}")
    if asked.save is not None:
        found = {"results": [asdict(each) for each in results], "documented": DOCUMENTED}
        asked.save.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(each.same < each.rows for each in results if each.against.startswith("TRL")))


def compare(file: str, name: str, count: int) -> Iterator[Result]:
    """Yield the comparisons of one file and one tokenizer."""
    template, _, tokenizer = name.rpartition(":")
    ours = FineTuneData(tokenizer, path=file, template=template or None, skip_bad_rows=True)
    source = ours._sources("path")[0]
    try:
        layout = ours.preparation.layout(source)
    except ConfigError:  # texts have no chat template
        ours = FineTuneData(tokenizer, path=file, skip_bad_rows=True)
        layout = ours.preparation.layout(source)
    rows = []
    for row in source.rows(whole=True):
        if not isinstance(row, RowFault):
            rows.append(row)
        if len(rows) == count:
            break
    trl = Result(file=file, tokenizer=name, against="TRL")
    yield check(trl, rows, lambda row: encode(ours, layout, row), lambda row: of_trl(ours, layout, row))
    if layout.format == "text" or (layout.format == "completion" and not layout.of_messages):
        pass  # LLaMA-Factory has no such rows
    elif (factory := factory_template(template or tokenizer, ours.tokenizer)) is None:
        yield Result(
            file=file, tokenizer=name, against="LLaMA-Factory", note="not compared: not installed, or no such template"
        )
    else:
        with_system = FineTuneData(tokenizer, path=file, template=template or None, system=SYSTEM)
        plain = [row for row in rows if not functions(row, layout)]
        result = Result(file=file, tokenizer=name, against="LLaMA-Factory, without functions")
        yield check(
            result,
            plain,
            lambda row: encode(with_system, layout, row),
            lambda row: of_factory(with_system, layout, row, factory),
        )
    yield packing(Result(file=file, tokenizer=name, against=f"TRL, packed by bfd into {LENGTH}"), ours, layout, rows)


def encode(data: FineTuneData, layout: Columns, row: Row) -> Example:
    """Return our example."""
    [made] = data.encoder.encode([row], layout, from_table=False)
    if isinstance(made, RowFault):
        raise made
    example: Example = made[0]
    return example


def conversation(data: FineTuneData, layout: Columns, row: Row) -> Conversation | None:
    """Return the messages that we make of a row; None if it is text."""
    if layout.format == "text" or (layout.format == "completion" and not layout.of_messages):
        return None
    if layout.format == "alpaca":
        made = from_alpaca(row, layout)
    elif layout.format == "chat":
        made = from_chat(row, layout, from_table=False)
    else:
        made = from_completion(row, layout, from_table=False)
    assert data.encoder.template is not None
    return data.encoder.template.fit(data.encoder._with_system(made))[0]


def functions(row: Row, layout: Columns) -> bool:
    """Return whether a row has functions or calls."""
    if layout.format != "chat":
        return False
    made = from_chat(row, layout, from_table=False)
    return bool(made.tools) or any(message["role"] == "tool" or "tool_calls" in message for message in made.messages)


def check(
    result: Result, rows: Sequence[Row], ours: Callable[[Row], Example], other: Callable[[Row], Example]
) -> Result:
    """Fill ``result`` with how many of ``rows`` are the same for both."""
    for number, row in enumerate(rows, start=1):
        left, right = ours(row), other(row)
        result.rows += 1
        if left == right:
            result.same += 1
        elif len(result.differ) < 3:
            what = "tokens" if left.ids != right.ids else "mask"
            parts = zip(left.ids + left.labels, right.ids + right.labels, strict=False)
            at = next((i for i, (a, b) in enumerate(parts) if a != b), -1)
            result.differ.append(f"row {number}: {what} at {at}; {len(left.ids)} and {len(right.ids)} tokens")
    return result


# -- TRL --------------------------------------------------------------------------------------------------------------


def prepared_by_trl(tokenizer: Any, rows: list[dict[str, Any]]) -> list[Example]:
    """Return what TRL's trainer makes of ``rows``."""
    from datasets import Dataset
    from trl.trainer.sft_trainer import SFTTrainer

    keys = rows[0].keys()
    # What its preparation reads of the trainer and of its arguments.
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=tokenizer.chat_template, completion_only_loss="completion" in keys
    )
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    made = SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, False, None, "train")
    return [Example(ids=row["input_ids"], labels=row["labels"]) for row in made]


def of_trl(data: FineTuneData, layout: Columns, row: Row) -> Example:
    """Return the example that TRL makes of a row."""
    whole = None if data.encoder.template is None else conversation(data, layout, row)
    if whole is None:
        if layout.format == "text":
            return prepared_by_trl(data.tokenizer, [{"text": row[layout.columns["text"]]}])[0]
        if layout.format == "completion":
            given = {role: row[layout.columns[role]] for role in ("prompt", "completion")}
            return prepared_by_trl(data.tokenizer, [given])[0]
        [prompt, answer] = split_by_us(data, layout, row)
        return prepared_by_trl(data.tokenizer, [{"prompt": prompt, "completion": answer}])[0]
    tools = {} if not whole.tools else {"tools": json.dumps(whole.tools)}
    messages = [
        {key: value for key, value in message.items() if value != ""} | {"content": message["content"]}
        for message in whole.messages
    ]
    turns = whole.learned(False)
    if not turns:
        ids = data.tokenizer.apply_chat_template(messages, tools=whole.tools, return_dict=False)
        return Example(ids=ids, labels=[IGNORED] * len(ids))
    parts = [{"prompt": messages[:turn], "completion": messages[turn : turn + 1], **tools} for turn in turns]
    everything = prepared_by_trl(data.tokenizer, [{"prompt": messages[:-1], "completion": messages[-1:], **tools}])[0]
    labels = [IGNORED] * len(everything.ids)
    for turn, part in zip(turns, parts, strict=True):
        made = prepared_by_trl(data.tokenizer, [part])[0]
        end = len(everything.ids) if turn == len(messages) - 1 else len(made.ids)
        labels[:end] = [new if new != IGNORED else old for new, old in zip(made.labels, labels[:end], strict=True)]
    return Example(ids=everything.ids, labels=labels)


def split_by_us(data: FineTuneData, layout: Columns, row: Row) -> tuple[str, str]:
    """Return prompt and answer of an instruction in Stanford Alpaca's words."""
    written = data.encoder.write(row, layout)
    begin, end = written.learned[0] if written.learned else (len(written.text),) * 2
    return written.text[:begin], written.text[begin:end]


def packing(result: Result, data: FineTuneData, layout: Columns, rows: Sequence[Row]) -> Result:
    """Fill ``result`` with how many sequences of our packing are those of TRL's."""
    from datasets import Dataset
    from trl import pack_dataset

    examples = [
        example
        for row in rows[:1000]
        if len((example := encode(data, layout, row)).ids) <= LENGTH and example.trainable
    ]
    columns = {"input_ids": [example.ids for example in examples], "labels": [example.labels for example in examples]}
    theirs = sorted(
        row["input_ids"] for row in pack_dataset(Dataset.from_dict(columns), LENGTH, "bfd", {"batch_size": 1000})
    )
    documents = Documents.from_examples(examples)
    parts, _ = pieces_of(documents, np.arange(len(documents)), LENGTH)
    made = packed(documents, parts, LENGTH)
    ours = sorted(made[index][0].tolist() for index in range(len(made)))
    result.rows = max(len(ours), len(theirs))
    result.same = (Counter(map(tuple, ours)) & Counter(map(tuple, theirs))).total()
    result.note = f"sequences: {len(ours)} and {len(theirs)}"
    return result


# -- LLaMA-Factory ----------------------------------------------------------------------------------------------------


def factory_template(name: str, tokenizer: Any) -> Any:
    """Return LLaMA-Factory's template, None if there is none or it cannot be imported."""
    for _ in range(10):
        try:
            templates = importlib.import_module("llamafactory.data.template").TEMPLATES
            return templates.get(_FACTORY.get(name, ""))
        except ModuleNotFoundError as error:  # it reads sounds and films, too
            missing = str(error.name)
            if missing.startswith("llamafactory"):
                return None
            sys.modules[missing] = ModuleType(missing)
            for loaded in [key for key in sys.modules if key.startswith("llamafactory")]:
                del sys.modules[loaded]
    return None


def of_factory(data: FineTuneData, layout: Columns, row: Row, template: Any) -> Example:
    """Return the example that LLaMA-Factory makes of the messages in a row."""
    whole = conversation(data, layout, row)
    assert whole is not None
    system, *turns = whole.messages
    while turns and turns[-1]["role"] != "assistant":  # it takes pairs
        turns.pop()
    ids: list[int] = []
    labels: list[int] = []
    for question, answer in template.encode_multiturn(data.tokenizer, turns, system["content"], ""):
        ids += question + answer
        labels += [IGNORED] * len(question) + answer
    if template.efficient_eos:
        ids.append(data.tokenizer.eos_token_id)
        labels.append(data.tokenizer.eos_token_id)
    begin = data.tokenizer.bos_token_id
    if begin is not None and encode(data, layout, row).ids[0] == begin != ids[0]:
        ids, labels = [begin, *ids], [IGNORED, *labels]
    return Example(ids=ids, labels=labels)


if __name__ == "__main__":
    sys.exit(main())
