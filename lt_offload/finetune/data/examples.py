"""Tokenised rows of files or the hub: made once, kept in a cache as Arrow files and read from there by memory map.

The key of the cache is a fingerprint of everything that decides about the tokens: files (size and time of change),
tokenizer, chat template, settings and this code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_offload import __version__
from lt_offload.errors import ConfigError
from lt_offload.finetune.data.chat.conversations import other_keys
from lt_offload.finetune.data.columns import Columns, FormatChoice, find_columns
from lt_offload.finetune.data.formats import Encoder, Example, as_conversations
from lt_offload.finetune.data.rows import Row, RowFault
from lt_offload.finetune.data.sources import Source
from lt_offload.finetune.processes import is_first
from lt_offload.replacing import replacing
from lt_offload.resources import user_cache, user_path

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger(__name__)
_log.addFilter(is_first)
MOST_NAMED = 3
"""Rows that a message names."""
_BATCH_ROWS = 512
_FILE = "examples.arrow"
_OF_EXAMPLE = ["ids", "labels", "place"]


class Examples(Sequence[Example]):
    """Tokenised rows, in order.

    Args:
        dataset: with lists of integers in the columns ``ids`` and ``labels``, and the file and row in ``place``.
        bad: number of rows that were left out.
    """

    def __init__(self, dataset: Dataset, bad: int = 0) -> None:
        self.dataset = dataset
        self.bad = bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return Example(**self.dataset.select_columns(_OF_EXAMPLE)[index])

    def __iter__(self) -> Iterator[Example]:
        for row in self.dataset.select_columns(_OF_EXAMPLE):
            yield Example(**row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """The settings and steps that make examples of sources.

    Args:
        encoder: makes the tokens.
        format: ``data.format``.
        columns: ``data.columns``.
        skip_bad_rows: leave out unusable rows with a warning, instead of refusing them.
        cache_dir: folder of the cache; null for that of the user.
        num_proc: processes; null for this one, whose tokenizer has threads.
        say: prints one line for the user.
    """

    encoder: Encoder
    format: FormatChoice
    columns: Mapping[str, str]
    skip_bad_rows: bool = False
    cache_dir: str | None = None
    num_proc: int | None = None
    say: Callable[[str], None] = _log.info

    def examples(self, sources: Sequence[Source]) -> Examples:
        """Return the examples of all ``sources``.

        Raises:
            ConfigError: if one cannot be read, or has rows that cannot be used, unless they are skipped.
        """
        from datasets import concatenate_datasets

        parts = [self._of_source(source) for source in sources]
        return Examples(concatenate_datasets([part.dataset for part in parts]), sum(part.bad for part in parts))

    def stream(self, source: Source) -> Stream:
        """Return the examples of ``source`` one after the other, without holding them all."""
        return Stream(self, source)

    def layout(self, source: Source, *, streaming: bool = True) -> Columns:
        """Return the columns of ``source`` by their roles, from its first rows.

        Raises:
            ConfigError: if its columns are of no known format, or settings do not fit it.
        """
        names, first = source.first(streaming=streaming)
        layout = find_columns(self.format, self.columns, names, first, source.said)
        self.encoder.check(layout)
        return layout

    def _of_source(self, source: Source) -> Examples:
        made = self._cached(source)
        dataset = made.dataset
        usable = dataset.data.column("fault").is_null().to_numpy()
        good, bad = np.flatnonzero(usable), np.flatnonzero(~usable)
        self.say(self.described(source, made.layout, len(good)))
        if len(bad):
            hint = None
            if len(bad) == len(dataset):
                hint = self.hint(next(source.rows(streaming=False))[1], made.layout, source)
            named = [f"{row['place']}: {row['fault']}" for row in dataset.select(bad[:MOST_NAMED])]
            report_bad(named, len(bad), len(dataset), source, skip=self.skip_bad_rows, hint=hint)
        for note, count in made.notes.items():
            _log.warning("%s=%r: %s (%d of %d rows)", source.setting, source.path, note, count, len(dataset))
        return Examples(dataset.select(good) if len(bad) else dataset, len(bad))

    def hint(self, row: Any, layout: Columns, source: Source) -> str | None:
        """Return the flag that makes ``row``, which cannot be used, and rows like it usable; None if there is none."""
        keys = None if isinstance(row, RowFault) else other_keys(row, layout, from_table=source.is_table)
        if keys is None:
            return None
        return f"--data.columns '{{{', '.join(f'{role}: {name}' for role, name in {**self.columns, **keys}.items())}}}'"

    def described(self, source: Source, layout: Columns, count: int | None) -> str:
        """Return the interpretation of the ``count`` rows of a source, in one line."""
        template, format = self.encoder.template, layout.format
        rows = f"{count:,} rows" if count is not None else "rows"
        said = f"{source.said}: {rows} as {layout.said}"
        if format == "text":
            return f"{said}; every token is learned"
        plain = template is None or (format == "completion" and not layout.of_messages)
        by = "no chat template" if plain or template is None else f"chat template: {template.name}"
        learned = {"responses": "answers", "last": "the last answer", "all": "everything"}[self.encoder.train_on]
        said = f"{said}; {by}; learned: {learned}"
        if plain and template is not None:
            said += f"; to train by the model's chat template: {as_conversations(layout)}"
        return said

    # -- the cache --------------------------------------------------------------------------------------------------

    def _cached(self, source: Source) -> Made:
        root = user_path(self.cache_dir) if self.cache_dir is not None else user_cache("data")
        folder = root / self._fingerprint(source)
        if (made := Made.load(folder)) is not None:
            return made
        layout = self.layout(source, streaming=False)
        try:
            with replacing(folder) as new:
                new.mkdir()
                self._make(layout, source, new)
                # A folder that is there and cannot be used (cut short, half
                # removed) would not be replaced: only an empty one is.
                if Made.load(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            if Made.load(folder) is None:  # else another process was faster
                raise _unusable(root, error) from error
        made = Made.load(folder)
        assert made is not None, "what has just been written can be read"
        return made

    def _make(self, layout: Columns, source: Source, folder: Path) -> None:
        import pyarrow as pa
        from datasets.utils import tqdm

        tokens, text = pa.list_(pa.int32()), pa.string()
        schema = pa.schema({"ids": tokens, "labels": tokens, "place": text, "fault": text})
        count, notes = 0, Counter[str]()
        encode = partial(_encoded, self.encoder, layout, source.is_table)
        # Rows that cannot be used keep their place, with a fault, so that they can be named and counted.
        with (
            pa.OSFile(str(folder / _FILE), "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
            _mapped(encode, _batches(source.rows(streaming=False)), self.num_proc or 1) as batches,
            tqdm(desc="Tokenizing", unit=" rows") as bar,
        ):
            for columns, noted in batches:
                writer.write_batch(pa.record_batch(columns, schema=schema))
                count += len(columns["ids"])
                notes.update(noted)
                bar.update(len(columns["ids"]))
        if count == 0:
            raise _no_rows(source)
        about = {"rows": count, "notes": notes, "layout": asdict(layout)}
        (folder / "about.json").write_text(json.dumps(about))

    def _fingerprint(self, source: Source) -> str:
        encoder = self.encoder
        template = encoder.template
        of_files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
        # What datasets finds itself has its own fingerprint, and must be open to be looked up. Files
        # are told by size and time, and are not read at all if they are in the cache.
        of_tables = source.tables(streaming=False) if source.is_table and not source.files else ()
        parts: list[Any] = [
            __version__, code_fingerprint(), source.kind, of_files,
            [table._fingerprint for _, table in of_tables],
            tokenizer_fingerprint(encoder.tokenizer),
            None if template is None else (template.name, template.text, template.tool_text, template.special),
            self.format, dict(self.columns), encoder.train_on, encoder.system, encoder.explicit_template,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


class Stream:
    """The examples of one source, one after the other, each time anew; for data that do not fit into memory.

    Rows that cannot be used are an error, or skipped and counted; a warning at the end of each pass has the count.
    """

    def __init__(self, preparation: Preparation, source: Source) -> None:
        self.preparation = preparation
        self.source = source
        self.bad = 0
        """Rows left out so far, in the last pass."""

    def __iter__(self) -> Iterator[Example]:
        for _, example in self.read():
            yield example

    def read(self, start: int = 0) -> Iterator[tuple[int, Example]]:
        """Yield the examples after the first ``start`` rows, each with the number of rows that are read by then."""
        preparation, source = self.preparation, self.source
        layout = preparation.layout(source)
        bad: list[str] = []
        notes: set[str] = set()
        self.bad = 0
        count = start
        for batch in _batches(itertools.islice(source.rows(streaming=True), start, None)):
            places, rows = zip(*batch, strict=True)
            made = preparation.encoder.encode(rows, layout, from_table=source.is_table)
            for number, (place, each) in enumerate(zip(places, made, strict=True), start=count):
                if isinstance(each, RowFault):
                    self.bad += 1
                    if not preparation.skip_bad_rows:
                        # Other keys are looked for only if the first row of all fails: later,
                        # others have been read by the same keys.
                        hint = preparation.hint(rows[0], layout, source) if number == 0 else None
                        report_bad([f"{place}: {each}"], 1, None, source, skip=False, hint=hint)
                    if self.bad <= MOST_NAMED:
                        bad.append(f"{place}: {each}")
                    continue
                example, its_notes = each
                for note in its_notes:
                    if note not in notes:
                        notes.add(note)
                        _log.warning("%s=%r: %s (%s)", source.setting, source.path, note, place)
                yield number + 1, replace(example, place=place)
            count += len(rows)
        if count == 0:
            raise _no_rows(source)
        if bad:
            report_bad(bad, self.bad, count, source, skip=True)


def _no_rows(source: Source) -> ConfigError:
    return ConfigError(f"{source.setting}={source.path!r} has no rows; it needs at least one")


def report_bad(
    named: Sequence[str], number: int, count: int | None, source: Source, *, skip: bool, hint: str | None = None
) -> None:
    """Report rows that cannot be used.

    Args:
        named: the first of them, by file and row, with their faults.
        number: of them.
        count: of all rows, None if that is not known.
        source: of the rows.
        skip: whether they are left out.
        hint: flag that makes rows like these usable.

    Raises:
        ConfigError: unless they are left out, or if none is left.
    """
    more = "; ..." if number > len(named) else ""
    rows = f"{number:,} of {count:,} rows" if count is not None else "a row"
    problem = f"{source.setting}={source.path!r}: {rows} cannot be used ({'; '.join(named)}{more})"
    if hint is not None:
        raise ConfigError(f"{problem}; say which key of a message is which: {hint}")
    if not skip:
        raise ConfigError(f"{problem}; mend or remove them, or set data.skip_bad_rows=true to train without them")
    if number == count:
        raise ConfigError(f"{problem}; data.skip_bad_rows=true leaves none: choose data.format and data.columns")
    _log.warning("%s; they are left out", problem)


@dataclass(frozen=True, slots=True)
class Made:
    """A folder of the cache."""

    dataset: Dataset
    notes: dict[str, int]
    """Notes on rows, with the number of rows of each."""
    layout: Columns

    @classmethod
    def load(cls, folder: Path) -> Made | None:
        """Return the content of ``folder``, None if it is absent or damaged."""
        from datasets import Dataset

        try:
            about = json.loads((folder / "about.json").read_text())
            dataset = Dataset.from_file(str(folder / _FILE))
            return cls(dataset, about["notes"], Columns(**about["layout"])) if len(dataset) == about["rows"] else None
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # Arrow's errors are ValueErrors
            return None


Placed = tuple[str, Row | RowFault]
Encoded = tuple[dict[str, list[Any]], list[str]]
"""Columns of the cache, and the notes of all their rows."""


def _encoded(encoder: Encoder, layout: Columns, from_table: bool, batch: Sequence[Placed]) -> Encoded:
    made = encoder.encode([row for _, row in batch], layout, from_table=from_table)
    good = [None if isinstance(each, RowFault) else each for each in made]
    columns = {
        "ids": [each[0].ids if each else [] for each in good],
        "labels": [each[0].labels if each else [] for each in good],
        "place": [place for place, _ in batch],
        "fault": [str(each) if isinstance(each, RowFault) else None for each in made],
    }
    return columns, [note for each in good if each for note in each[1]]


_in_worker: Callable[[Any], Any]
"""The function that a process beside this one calls; handed over once, as it has the whole tokenizer."""


def _begin_worker(function: Callable[[Any], Any]) -> None:
    global _in_worker
    _in_worker = function


def _work(item: Any) -> Any:
    return _in_worker(item)


@contextmanager
def _mapped(function: Callable[[Any], Any], items: Iterator[Any], processes: int) -> Iterator[Iterator[Any]]:
    """Enclose the results for ``items`` in their order, made by this process or by others."""
    if processes == 1:
        yield map(function, items)
        return
    # Not multiprocessing.Pool, which ends its processes by SIGTERM: those that have inherited a Trainer's handler of it
    # stay, and are waited for.
    with ProcessPoolExecutor(processes, initializer=_begin_worker, initargs=(function,)) as pool:
        try:
            yield _in_order(pool, items, 2 * processes)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, items: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Yield the results for ``items``, of which at most ``ahead`` more have been read."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(pool.submit(_work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint of a tokenizer: equal ones make the same tokens."""
    inner = tokenizer.backend_tokenizer
    return hashlib.sha256(inner.to_str().encode(errors="surrogatepass")).hexdigest() + type(tokenizer).__name__


def code_fingerprint() -> str:
    """Return a fingerprint of the code that makes tokens from rows, and of the libraries that it calls."""
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
    here = Path(__file__).parent
    # batches/ is left out: it arranges tokens in rows, and does not change them.
    for file in sorted([*here.glob("*.py"), *here.glob("chat/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _unusable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.cache_dir={str(root)!r} cannot be written: {error.strerror or error}; name another folder"
    )
