"""A preview of training: rows with the learned parts of them, lengths, losses, fill of batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_offload.finetune.data.batches import padded_width, shuffled
from lt_offload.finetune.data.formats import IGNORED, Example
from lt_offload.finetune.data.sequences import Documents, named, sequences_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lt_offload.finetune.data.module import FineTuneData

STREAMED = 1000
"""Rows of streamed data that are shown."""
_CHARACTERS = 1600
"""Characters that are shown of a sample."""
LEARNED, REST, SPECIAL = "bold green", "dim", "cyan"


class Preview:
    """Findings about the training data of ``data``, of streamed data about the first rows.

    Raises ``ConfigError`` if they cannot be used.
    """

    def __init__(self, data: FineTuneData) -> None:
        self.data = data
        self.said: list[str] = []
        """The interpretation of each source."""
        training, validation = data.examples(), data.examples("validation_path")
        training.say = validation.say = self.said.append
        if data.streaming:
            self.said += [training.described(source, training.layout(source), None) for source in training.sources]
            self.documents = Documents.from_examples(islice(training, STREAMED))
            self.documents.bad = training.bad
            return
        self.documents = training.documents()
        if validation.sources:
            validation.documents()

    def parts(self, *, samples: int, color: bool) -> Iterator[RenderableType]:
        """Yield parts for a console of rich, with so many ``samples`` from beginning to end of the data.

        Learned parts have a ``color``, or stand between « and ».
        """
        from rich.text import Text

        legend = Text("Learned: ")
        legend.append("like this" if color else "«like this»", LEARNED)
        if color:
            legend.append(", not learned: ").append("like this", REST)
        legend.append("; ").append("tokens", SPECIAL).append(" in <|...|> are special ones; ↵ is a learned line break.")
        count = len(self.documents)
        if samples and count:
            yield legend
        for index in sorted({round(i * (count - 1) / max(samples - 1, 1)) for i in range(min(samples, count))}):
            yield from _sample(self.data.tokenizer, self.documents[index], color)
        yield from self._statistics()

    def _statistics(self) -> Iterator[RenderableType]:
        from rich.rule import Rule
        from rich.table import Table

        data, documents, lengths = self.data, self.documents, self.documents.lengths
        yield Rule(f"of the first {len(documents):,} rows" if data.streaming else "", align="left")
        yield from self.said
        if data.encoder.template is not None and data.system is not None:
            yield f"System message of conversations without one: {data.system}"
        if documents.bad:
            yield f"{documents.bad:,} rows cannot be used and are left out"
        if not len(lengths):
            return
        table = Table("", box=None, pad_edge=False, header_style="")
        for title in ("in all", "per row: mean", "least", "median", "90 %", "99 %", "most"):
            table.add_column(title, justify="right")
        for title, counts in (("tokens", lengths), ("learned", documents.trained(data.max_length)[0])):
            marks = np.percentile(counts, (0, 50, 90, 99, 100), method="inverted_cdf")
            table.add_row(title, f"{counts.sum():,}", f"{counts.mean():,.0f}", *(f"{mark:,.0f}" for mark in marks))
        yield table
        yield from _sequences(data, documents)


def _sample(tokenizer: Any, example: Example, color: bool, role: str | None = None) -> Iterator[RenderableType]:
    from rich.rule import Rule
    from rich.text import Text

    if example.second:
        for role, side in example.sides().items():
            yield from _sample(tokenizer, side, color, role)
        return
    learned = sum(label != IGNORED for label in example.labels)
    title = example.place if role is None else f"{example.place}, {role}"
    yield Rule(
        f"{title}: {len(example.ids):,} tokens, {learned:,} {'learned' if role is None else 'compared'}", align="left"
    )
    text, left, inside = Text(), _CHARACTERS, False
    for piece, is_learned, is_special in pieces(tokenizer, example):
        if left > 0:
            if is_learned != inside and not color:
                text.append("«" if is_learned else "»")
            inside = is_learned
            shown = piece[:left].replace("\n", "↵\n") if is_learned else piece[:left]
            style = LEARNED if is_learned else REST
            text.append(shown, f"{SPECIAL} {style}" if is_special else style)
        left -= len(piece)
    if inside and not color:
        text.append("»")
    if left < 0:
        text.append(f" ... {-left:,} more characters", "italic")
    yield text


def pieces(tokenizer: Any, example: Example) -> Iterator[tuple[str, bool, bool]]:
    """Yield the text of ``example`` in pieces, with whether they are learned and whether they are a special token."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    kinds = [
        (label != IGNORED, token if token in special else None)
        for token, label in zip(example.ids, example.labels, strict=True)
    ]
    done = ""
    position = 0
    for (learned, token), run in groupby(kinds):
        position += len(list(run))
        whole = tokenizer.decode(example.ids[:position], skip_special_tokens=False)
        # Decoding the pieces by themselves would lose the spaces between them.
        yield whole[len(done) :], learned, token is not None
        done = whole


def _sequences(data: FineTuneData, documents: Documents) -> Iterator[str]:
    limit, size = data.max_length, data.batch_size
    rows = sequences_of(documents, limit, data.pack)
    if data.pack == "wrapped":
        yield f"{len(rows):,} sequences of {limit:,} tokens, one text after the other"
        return
    pairs = rows.reference is not None
    if split := 0 if pairs else len(rows.pieces) + len(rows.left_out) - len(documents):
        yield f"{split:,} times a text goes on in another sequence: it is longer than data.max_length={limit}"
    yield from rows.losses
    if left_out := named(documents, rows.left_out, "{}"):
        yield f"{len(rows.left_out):,} rows are left out: {left_out}"
    if not len(rows):
        return
    if len(rows) < size:
        yield f"too few sequences for a batch of data.batch_size={size}: there are {len(rows)}"
    said = f"{len(rows):,} {'pairs' if pairs else 'sequences'} of up to {limit:,} tokens{' for each answer' * pairs}"
    real = int(rows.lengths.sum())
    if data.pack:
        yield f"{said}, packed: {real / (len(rows) * limit):.1%} full"
        return
    order = shuffled(rows.lengths, size if data.group_by_length else None, (data.seed, 0, 0))
    batches = np.split(rows.longest[order], range(size, len(rows), size))
    padded = sum(padded_width(int(longest.max()), limit) * len(longest) for longest in batches) * (1 + pairs)
    last = f", the last one of {len(batches[-1])}" if len(batches[-1]) < size else ""
    yield f"{said} in {len(batches):,} batches of {size}{last}, {1 - real / padded:.1%} of them padding"
