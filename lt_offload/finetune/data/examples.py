"""Tokenised rows of files or the hub: made once, kept in a cache as Arrow files and read from there by memory map.

The key of the cache is a fingerprint of everything that decides about the tokens: files (size and time of change),
tokenizer, chat template, settings and this code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset

from lt_offload import __version__
from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.batches import Place, unchanged
from lt_offload.finetune.data.columns import Columns, find_columns
from lt_offload.finetune.data.formats import Encoder, Example, as_conversations
from lt_offload.finetune.data.rows import Row, RowFault
from lt_offload.finetune.data.sequences import MOST_NAMED, Documents, features_of_rows
from lt_offload.finetune.data.sources import Source
from lt_offload.finetune.processes import is_first
from lt_offload.resources import user_cache, user_path

if TYPE_CHECKING:
    import datasets

    from lt_offload.finetune.data.module import FineTuneData

_log = logging.getLogger(__name__)
_log.addFilter(is_first)
_BATCH_ROWS = 512
Placed = tuple[str, Example | RowFault]
"""File and row, and its example or fault."""


@dataclass(frozen=True)
class _Encoding(Dataset[list[Placed]]):
    """Examples and faults of rows, each with its place; the rows are what it is indexed by."""

    encoder: Encoder
    layout: Columns

    def __getitem__(self, rows: Sequence[tuple[str, Row | RowFault]]) -> list[Placed]:
        places, each = zip(*rows, strict=True)
        return list(zip(places, self.encoder.encode(each, self.layout), strict=True))


@dataclass(kw_only=True, eq=False)
class Examples:
    """The examples of sources, one after the other, by the settings of ``data``.

    ``documents`` makes them once, and iteration each time anew, for data that do not fit into memory.
    """

    data: FineTuneData
    """Its encoder is asked for when the columns are known: loading a tokenizer may mean to convert a model."""
    sources: Sequence[Source]
    say: Callable[[str], None] = rank_zero_info
    """Prints one line for the user."""
    bad: int = 0
    """Rows left out so far, in the last iteration."""

    def documents(self) -> Documents:
        """Return the examples; raises ``ConfigError`` as iteration does."""
        from datasets import concatenate_datasets

        datasets, bad = zip(*map(self._kept, self.sources), strict=True)
        return Documents(concatenate_datasets(datasets), bad=sum(bad))

    def __iter__(self) -> Iterator[Example]:
        return (example for _, example in self.read())

    def read(self, place: Place = (0, 0)) -> Iterator[tuple[Place, Example]]:
        """Yield the examples from ``place`` on, each with the place after it.

        Raises ``ConfigError`` if a source cannot be read, or has rows that cannot be used, unless they are skipped and
        counted: a warning at the end of each source has the count.
        """
        self.bad = 0
        first, start = place
        for number, source in enumerate(self.sources[first:], start=first):
            for rows, example in self._streamed(source, start):
                yield (number, rows), example
            start = 0

    def layout(self, source: Source, *, streaming: bool = True) -> Columns:
        """Return the columns of ``source`` by their roles, from its first rows.

        Raises ``ConfigError`` if its columns are of no known format, or settings do not fit it.
        """
        names, first = source.first(streaming=streaming)
        layout = find_columns(self.data.format, self.data.columns or {}, names, first, source.said)
        self.data.encoder.check(layout)
        return layout

    def described(self, source: Source, layout: Columns, count: int | None) -> str:
        """Return the interpretation of the ``count`` rows of a source, in one line."""
        template = self.data.encoder.template
        said = f"{source.said}: {'' if count is None else f'{count:,} '}rows as {layout.said}"
        if layout.format == "text":
            return f"{said}; every token is learned"
        by = "no chat template" if layout.of_texts or template is None else f"chat template: {template.name}"
        learned = {"responses": "answers", "last": "the last answer", "all": "everything"}[self.data.train_on]
        learned = "chosen answers rather than rejected ones" if layout.format == "preference" else learned
        texts = layout.format == "completion" and layout.of_texts
        hint = "" if template is None or not texts else as_conversations(layout)
        return f"{said}; {by}; learned: {learned}" + (hint and f"; to train by the model's chat template: {hint}")

    def _kept(self, source: Source) -> tuple[datasets.Dataset, int]:
        """Return the examples of ``source``, and the number of rows that are left out."""
        from pyarrow.compute import list_flatten

        layout = self.layout(source, streaming=False)
        dataset = self._cached(source, layout)
        usable = dataset.data.column("fault").is_null().to_numpy()  # a million Python objects take many seconds
        good, bad = np.flatnonzero(usable), np.flatnonzero(~usable)
        self.say(self.described(source, layout, len(good)))
        if len(bad):
            named = [f"{row['place']}: {row['fault']}" for row in dataset.select(bad[:MOST_NAMED])]
            report_bad(named, len(bad), len(dataset), source, skip=self.data.skip_bad_rows)
        for note, number in Counter(list_flatten(dataset.data.column("notes")).to_pylist()).items():
            _log.warning("%s=%r: %s (%d of %d rows)", source.setting, source.path, note, number, len(dataset))
        return dataset.select(good) if len(bad) else dataset, len(bad)

    def _streamed(self, source: Source, start: int) -> Iterator[tuple[int, Example]]:
        bad: list[str] = []
        notes: set[str] = set()
        before, number = self.bad, start
        rows = self._encoded(source, self.layout(source), streaming=True, start=start)
        for number, (place, made) in enumerate(rows, start=start + 1):
            if isinstance(made, RowFault):
                self.bad += 1
                if not self.data.skip_bad_rows:
                    report_bad([f"{place}: {made}"], 1, None, source, skip=False)
                bad += [f"{place}: {made}"] * (len(bad) < MOST_NAMED)
                continue
            for note in (each for each in made.notes if each not in notes):
                _log.warning("%s=%r: %s (%s)", source.setting, source.path, note, place)
            notes.update(made.notes)
            yield number, replace(made, place=place)
        if bad:
            report_bad(bad, self.bad - before, number, source, skip=True)

    # -- the cache --------------------------------------------------------------------------------------------------

    def _cached(self, source: Source, layout: Columns) -> datasets.Dataset:
        """Return the tokenised rows of ``source``; those that cannot be used keep their place, with a fault."""
        from datasets import Dataset, Features, List, Value
        from datasets.exceptions import DatasetGenerationError

        root = user_path(self.data.cache_dir) if self.data.cache_dir is not None else user_cache("data")
        text = Value("string")
        try:
            return Dataset.from_generator(
                partial(self._rows, source, layout),
                features=Features(features_of_rows() | {"fault": text, "notes": List(text)}),
                cache_dir=str(root),
                fingerprint=self._fingerprint(source, layout),
            )
        except (DatasetGenerationError, OSError, ValueError) as error:
            # The error of a row or a disk that datasets has wrapped; or that of a file of the
            # cache that was cut short, as Arrow's errors are ValueErrors.
            wrapped = isinstance(error, DatasetGenerationError)
            cause = error.__cause__ or error if wrapped else error
            if wrapped and not isinstance(cause, OSError):
                raise cause from None
            why = getattr(cause, "strerror", None) or first_line(cause)
            raise ConfigError(
                f"data.cache_dir={str(root)!r} cannot be used: {why}; remove it, or name another folder"
            ) from error

    def _encoded(self, source: Source, layout: Columns, *, streaming: bool = False, start: int = 0) -> Iterator[Placed]:
        """Yield an example or a fault for each row of ``source`` from number ``start`` on."""
        rows = islice(source.rows(streaming=streaming), start, None)
        # Rows are read here, and handed to the workers as if they were numbers of samples: mistakes in files are
        # errors here, and not in the words of a worker's loader.
        loader: DataLoader[Any] = DataLoader(
            _Encoding(self.data.encoder, layout),
            batch_size=None,
            sampler=iter(lambda: list(islice(rows, _BATCH_ROWS)), []),
            collate_fn=unchanged,
            num_workers=0 if self.data.num_proc in (None, 1) else self.data.num_proc,
            generator=torch.Generator(),  # making an iterator draws from it
        )
        yield from itertools.chain.from_iterable(loader)

    def _rows(self, source: Source, layout: Columns) -> Iterator[dict[str, Any]]:
        for place, made in self._encoded(source, layout):
            if isinstance(made, RowFault):
                yield {"ids": [], "labels": [], "second": 0, "place": place, "fault": str(made), "notes": []}
            else:
                yield {**asdict(made), "place": place, "fault": None}

    def _fingerprint(self, source: Source, layout: Columns) -> str:
        import tokenizers
        import transformers

        encoder, template, here = self.data.encoder, self.data.encoder.locator.template, Path(__file__).parent
        code = [file.read_bytes() for file in sorted(here.glob("*.py"))]
        of_files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
        parts: list[Any] = [
            __version__, transformers.__version__, tokenizers.__version__, source.kind, of_files,
            # What datasets finds itself must be open to be looked up. Files are told by size and time.
            None if source.opened is None else source.opened(False)._fingerprint,
            type(encoder.tokenizer).__name__, encoder.tokenizer.backend_tokenizer.to_str(),
            template.name, template.text, template.tool_text, template.special,
            asdict(layout), encoder.train_on, encoder.system,
        ]  # fmt: skip
        return hashlib.sha256(b"".join([json.dumps(parts, default=str).encode(), *code])).hexdigest()[:32]


def report_bad(named: Sequence[str], number: int, count: int | None, source: Source, *, skip: bool) -> None:
    """Report ``number`` rows of ``count`` (None: not known) that cannot be used, with the ``named`` first ones.

    Raises ``ConfigError`` unless they are left out (``skip``), or if none is left.
    """
    more = "; ..." if number > len(named) else ""
    rows = f"{number:,} of {count:,} rows" if count is not None else "a row"
    problem = f"{source.setting}={source.path!r}: {rows} cannot be used ({'; '.join(named)}{more})"
    if not skip:
        raise ConfigError(f"{problem}; mend or remove them, or set data.skip_bad_rows=true to train without them")
    if number == count:
        raise ConfigError(f"{problem}; data.skip_bad_rows=true leaves none: choose data.format and data.columns")
    _log.warning("%s; they are left out", problem)
