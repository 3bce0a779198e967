"""Our side of the comparison: the rows of a file, their messages, texts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.columns import Columns
from lt_offload.finetune.data.conversations import Conversation
from lt_offload.finetune.data.formats import Example, Written
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.data.rows import Row, RowFault
from lt_offload.finetune.data.sources import sources


@dataclass
class Rows:
    """The first rows of a file that can be used, and what we make of them.

    Args:
        data: settings, tokenizer and template.
        layout: where in the rows things are.
        rows: as read.
        examples: tokens and labels.
    """

    data: FineTuneData
    layout: Columns
    rows: Sequence[Row]
    examples: Sequence[Example]

    @classmethod
    def read(cls, file: str, tokenizer: str, template: str | None, count: int) -> Rows:
        """Return up to ``count`` rows of ``file``."""
        data = FineTuneData(tokenizer, path=file, template=template, skip_bad_rows=True)
        if data.encoder.template is None:  # instructions are written so anyway, conversations are an error
            data = FineTuneData(tokenizer, path=file, template="alpaca", skip_bad_rows=True)
        source = sources(file, subset=None, split="train", setting="data.path")[0]
        try:
            layout = data.examples().layout(source)
        except ConfigError:  # texts have no chat template
            data = FineTuneData(tokenizer, path=file, skip_bad_rows=True)
            layout = data.examples().layout(source)
        rows: list[Row] = []
        examples = []
        for _, row in source.rows(streaming=False):
            if isinstance(row, RowFault):
                continue
            [made] = data.encoder.encode([row], layout)
            if not isinstance(made, RowFault):
                rows.append(row)
                examples.append(made)
            if len(rows) == count:
                break
        return cls(data, layout, rows, examples)

    @cached_property
    def written(self) -> list[Written]:
        """The rows as text."""
        return [self.data.encoder.write(row, self.layout) for row in self.rows]

    @cached_property
    def conversations(self) -> list[Conversation | None]:
        """The messages of the rows as the template writes them; None where no template does."""
        if self.layout.of_texts:
            return [None] * len(self.rows)
        template = self.data.encoder.locator.template
        return [template.fit(self.data.encoder.conversation(row, self.layout))[0] for row in self.rows]

    def texts(self, role: str) -> list[str]:
        """Return the column of a role."""
        return [row[self.layout.columns[role]] for row in self.rows]


@dataclass(kw_only=True)
class Comparison:
    """How many rows of a file are the same, and why the others are not.

    Args:
        file: its name.
        tokenizer: its name, after that of a template of ours, if it is not its own.
        against: which package.
        rows: how many were compared.
        same: how many have the same tokens and labels.
        documented: how many differ for a documented reason; a row may have several.
        undocumented: how many differ for no known reason.
        examples: the first rows that differ, by reason.
    """

    file: str
    tokenizer: str
    against: str
    rows: int = 0
    same: int = 0
    documented: dict[str, int] = field(default_factory=dict)
    undocumented: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, number: int, ours: Example, theirs: Example | None, why: Callable[[], Sequence[str]]) -> None:
        """Count a row.

        Args:
            number: which one of the file, counted from 1.
            ours: our example.
            theirs: that of the other package, None if it leaves the row out.
            why: returns the reasons of a difference, none if there is no known one.
        """
        self.rows += 1
        if ours == theirs:
            self.same += 1
            return
        reasons = why()
        self.undocumented += not reasons
        for reason in reasons or ["undocumented"]:
            if reasons:
                self.documented[reason] = self.documented.get(reason, 0) + 1
            self.examples.setdefault(reason, f"row {number}: {_first_difference(ours, theirs)}")


def short(tokenizer: str) -> str:
    """Return a tokenizer's name without the folder that it is in."""
    return Path(tokenizer).name


def _first_difference(ours: Example, theirs: Example | None) -> str:
    if theirs is None:
        return "left out"
    what = "tokens" if ours.ids != theirs.ids else "labels"
    left, right = (getattr(each, "ids" if what == "tokens" else "labels") for each in (ours, theirs))
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"{what} from {at}: {left[at : at + 6]} and {right[at : at + 6]}, {len(left)} and {len(right)} tokens"
