"""TRL's side: its trainer's own preparation of rows, and its packing.

A conversation becomes one row for each answer, which is the completion of what comes before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from lt_offload.finetune.data.conversations import Conversation
from lt_offload.finetune.data.formats import IGNORED, Example, Written
from lt_offload.finetune.data.sequences import Documents, sequences_of
from lt_offload.finetune.data.templates import Span
from scripts.agreement.rows import Comparison, Rows

LENGTH = 1024
"""Of packed sequences."""
EMPTY = "an empty answer"
FIRST = "an answer at the beginning"
REWRITTEN = "earlier turns written anew"
MERGED = "tokens of the prompt alone"
DOCUMENTED = {
    EMPTY: "TRL learns the token that ends an answer without words; we learn nothing from such an answer, as it would "
    "teach the model to say nothing",
    FIRST: "TRL has no form for an answer without anything before it; we learn it",
    REWRITTEN: "the template writes a conversation in another way once more follows, as Mistral's since v3, which move "
    "system message and functions: an earlier answer would be a row of its own for TRL, we learn it where it stands; "
    "these answers are not compared",
    MERGED: "TRL learns from where the tokens of the prompt alone and those of the whole differ, which may be in white "
    "space before the answer; we learn from the first token that has a character of the answer",
}


def compare(rows: Rows, result: Comparison) -> Comparison:
    """Fill ``result`` with how many rows TRL's trainer makes the same examples of."""
    for number, (ours, (theirs, rewritten)) in enumerate(zip(rows.examples, _examples(rows), strict=True)):
        result.add(number + 1, ours, theirs, partial(_why, rows, number, theirs, rewritten))
    return result


def pack(rows: Rows, result: Comparison) -> Comparison:
    """Fill ``result`` with how many sequences of our packing are those of TRL's."""
    from datasets import Dataset
    from trl import pack_dataset

    examples = [
        example for example in rows.examples[:1000] if len(example.ids) <= LENGTH and {*example.labels[1:]} - {IGNORED}
    ]
    columns = {"input_ids": [example.ids for example in examples], "labels": [example.labels for example in examples]}
    theirs = [row["input_ids"] for row in pack_dataset(Dataset.from_dict(columns), LENGTH, "bfd", {"batch_size": 1000})]
    made = sequences_of(Documents.from_examples(examples), LENGTH, True)
    ours = [made[index][0].tolist() for index in range(len(made))]
    result.rows = max(len(ours), len(theirs))
    result.same = (Counter(map(tuple, ours)) & Counter(map(tuple, theirs))).total()
    result.undocumented = result.rows - result.same
    return result


def _examples(rows: Rows) -> list[tuple[Example, list[int]]]:
    """Return what TRL makes of the rows, and the answers that it would not learn in this row."""
    tokenizer = rows.data.tokenizer
    if rows.layout.format == "text":
        texts: list[dict[str, Any]] = [{"text": text} for text in rows.texts("text")]
    elif rows.layout.format == "completion" and not rows.layout.of_messages:
        pairs = zip(rows.texts("prompt"), rows.texts("completion"), strict=True)
        texts = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    else:
        return _conversations(tokenizer, [each for each in rows.conversations if each is not None])
    return [(example, []) for example in _prepared(tokenizer, texts)]


def _conversations(tokenizer: Any, conversations: Sequence[Conversation]) -> list[tuple[Example, list[int]]]:
    parts: list[dict[str, Any]] = []
    for conversation in conversations:
        messages = [
            {key: value for key, value in message.items() if value != ""} | {"content": message["content"]}
            for message in conversation.messages
        ]
        tools = {} if not conversation.tools else {"tools": json.dumps(conversation.tools)}
        ends = [*_turns(conversation), len(messages) - 1]
        parts += [{"prompt": messages[:end], "completion": messages[end : end + 1], **tools} for end in ends]
    made = iter(_prepared(tokenizer, parts))
    return [
        _joined(conversation, [next(made) for _ in _turns(conversation)], next(made)) for conversation in conversations
    ]


def _turns(conversation: Conversation) -> list[int]:
    """Return the answers that have a prompt."""
    return [turn for turn in conversation.answers if turn > 0]


def _joined(conversation: Conversation, parts: Sequence[Example], whole: Example) -> tuple[Example, list[int]]:
    """Return the whole conversation with what each of its parts learns, and the answers whose part is none of it."""
    labels, rewritten = [IGNORED] * len(whole.ids), []
    for turn, part in zip(_turns(conversation), parts, strict=True):
        if not _follows(whole.ids, part):
            rewritten.append(turn)
            continue
        for place, label in enumerate(part.labels[: len(whole.ids)]):
            if label != IGNORED and whole.ids[place] == label:
                labels[place] = label
    return Example(ids=whole.ids, labels=labels), rewritten


def _follows(whole: Sequence[int], part: Example) -> bool:
    """Return whether a conversation begins as a part of it does, up to the last token, which may go on."""
    return whole[: len(part.ids) - 1] == part.ids[:-1]


def _prepared(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[Example]:
    """Return what TRL's trainer makes of ``rows``."""
    from datasets import IterableDataset
    from trl.trainer.sft_trainer import SFTTrainer

    # What its preparation reads of the trainer and of its arguments.
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=tokenizer.chat_template, completion_only_loss="completion" in rows[0]
    )
    args: Any = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    # Not a table: that would give all functions the arguments of each other.
    given = IterableDataset.from_generator(lambda: iter(rows))
    made = SFTTrainer._prepare_dataset(trainer, given, tokenizer, args, False, None, "train")
    return [Example(ids=row["input_ids"], labels=row["labels"]) for row in made]


def _why(rows: Rows, number: int, theirs: Example, rewritten: Sequence[int]) -> list[str]:
    """Return the reasons why a row is not as ours, none if that is not known."""
    ours, written, conversation = rows.examples[number], rows.written[number], rows.conversations[number]
    if ours.ids != theirs.ids:
        return []
    places = {} if conversation is None else _places(rows, conversation, rewritten)
    if conversation is None and not written.learned:
        places[EMPTY] = [(0, len(written.text))]
    batch = rows.data.tokenizer(written.text, add_special_tokens=rows.layout.of_texts, return_offsets_mapping=True)
    reasons = []
    for place, left, right in zip(batch["offset_mapping"], ours.labels, theirs.labels, strict=True):
        if left == right:
            continue
        if left == IGNORED and _touches(place, places.get(EMPTY, [])):
            reasons.append(EMPTY)
        elif right == IGNORED and (
            found := [why for why in (FIRST, REWRITTEN) if _touches(place, places.get(why, []))]
        ):
            reasons.append(found[0])
        elif left == IGNORED and not _touches(place, written.learned) and _before_answer(written, place):
            reasons.append(MERGED)
        else:
            return []
    return list(dict.fromkeys(reasons))


def _places(rows: Rows, conversation: Conversation, rewritten: Sequence[int]) -> dict[str, list[Span]]:
    """Return by reason where the answers are that TRL learns in another way."""
    locator = rows.data.encoder.locator
    learned = conversation.learned(False)
    turns = {
        EMPTY: [turn for turn in conversation.answers if turn not in learned],
        FIRST: [turn for turn in conversation.answers if turn == 0],
        REWRITTEN: list(rewritten),
    }
    return {reason: locator.locate(conversation, each)[1] for reason, each in turns.items()}


def _touches(place: Span, spans: Sequence[Span]) -> bool:
    """Return whether any character of a token is in one of ``spans``."""
    return any(begin < place[1] and place[0] < end for begin, end in spans)


def _before_answer(written: Written, place: Span) -> bool:
    """Return whether there is but white space between a token and the answer that begins after it."""
    following = [begin for begin, _ in written.learned if begin >= place[1]]
    return bool(following) and not written.text[place[0] : min(following)].strip()
