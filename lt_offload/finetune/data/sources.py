"""Sources of rows: files, the hub, or Python's own documentation.

Mistakes in a path are errors here, before a model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.files import SAVED, TABLES, find_files, kind_of_file
from lt_offload.finetune.data.rows import Row, RowFault, read_rows
from lt_offload.resources import is_dir, is_file, user_path

Table = Any
"""A table of ``datasets``, with all rows or with rows one after the other; or an iterator of Arrow's batches."""

PYDOC = "pydoc_topics"
"""Name of the source that every Python installation has: the language reference behind ``help()``."""
PYDOC_HELD_OUT = 8
"""One topic in this many, in alphabetical order, is held out for validation."""

_LOOKED_AT = 1000
"""Rows whose keys are the columns of JSON data."""
_AT_ONCE = 1000
"""Rows of a table that are made at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows of one path: read from its files, or tables of ``datasets``.

    Args:
        path: the setting's value.
        setting: its name.
        kind: of its files; ``hub`` or ``saved`` where ``datasets`` finds them.
        place: whether the rows are on the hub, in a folder with splits, or in files without.
        files: the files, none for a data set of ``datasets``.
        note: their part of a folder that has more, in a few words.
        tables: tables of ``datasets``, each with the name of its file, and opened ``streaming`` or not.
    """

    path: str
    setting: str
    kind: str
    place: Literal["hub", "splits", "files"] = "files"
    files: Sequence[Path] = ()
    note: str = ""
    tables: Sequence[tuple[str, Callable[[bool], Table]]] = ()

    @property
    def is_table(self) -> bool:
        """True if rows come from tables, all with the same columns."""
        return bool(self.tables)

    @property
    def said(self) -> str:
        """The setting, and the part of a folder that is taken."""
        return f"{self.setting}={self.path!r}{f' ({self.note})' if self.note else ''}"

    def rows(self, *, streaming: bool) -> Iterator[tuple[str, Row | RowFault]]:
        """Yield one row after the other, each with its file and its number there, which begins at 1.

        With ``streaming`` no file is read as a whole, and data on the hub are fetched as they are read. Raises
        ``ConfigError`` if a file cannot be read, or only as a whole.
        """
        for file in () if self.is_table else self.files:
            of_file = read_rows(file, self.kind, self.setting, whole=not streaming)
            for number, row in enumerate(of_file, start=1):
                yield f"{file.name} row {number}", row
        for name, opened in self.tables:
            try:
                for number, row in enumerate(_rows_of(opened(streaming)), start=1):
                    yield f"{name} row {number}".lstrip(), row
            except ConfigError:
                raise
            except Exception as error:  # the readers raise whatever their libraries do, each with another base class
                raise self._unreadable(error, name) from error

    def first(self, *, streaming: bool) -> tuple[list[str], Row]:
        """Return the columns of the first rows, and the first one that can be read; ``ConfigError`` without one."""
        # All rows of a table have the same columns, and each one may have to be fetched. A row of
        # JSON may lack a key that others have, so the first one does not tell all columns.
        rows = self.rows(streaming=streaming and self.is_table)
        looked_at = list(itertools.islice(rows, 1 if self.is_table else _LOOKED_AT))
        readable = [row for _, row in looked_at if isinstance(row, Mapping)]
        if not readable:
            why = f" ({looked_at[0][0]} {looked_at[0][1]})" if looked_at else "; it needs at least one"
            raise ConfigError(f"{self.setting}={self.path!r} has no rows that can be read{why}")
        return list(dict.fromkeys(name for row in readable for name in row)), readable[0]

    def _unreadable(self, error: Exception, file: str) -> ConfigError:
        # The error at the bottom of a chain says what is wrong.
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        where = f"{self.setting}={self.path!r}"
        if self.kind == "hub":
            where += " is neither a file here nor a data set that the hub would give"
        else:
            where += f"{file and f' ({file})'} cannot be read" + (f" as {self.kind}" if self.files else "")
        return ConfigError(f"{where}: {first_line(root)}")


def _rows_of(table: Table) -> Iterator[Row]:
    # As Arrow's values: to decode pictures in other columns would take long, or a package that is not there.
    batches = table if isinstance(table, Iterator) else table.with_format("arrow").iter(_AT_ONCE)
    for batch in batches:
        for row in batch.to_pylist():
            yield {name: _dense(value) for name, value in row.items()}


def _dense(value: Any) -> Any:
    """Return ``value`` without the keys that are null because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list) else value


def sources(path: str | Sequence[str], *, subset: str | None, split: str, setting: str) -> list[Source]:
    """Return the sources that ``path``, the value of ``setting``, names; nothing is read yet.

    ``subset`` is the configuration of a data set on the hub, and ``split`` that of one, or of a folder that has
    several. Raises ``ConfigError`` if there is nothing there.
    """
    if path == PYDOC:
        return [_pydoc(setting)]
    items = [path] if isinstance(path, str) else list(path)
    if not all(items) or not items:
        given = "''" if items else repr(path)
        raise ConfigError(f"{setting}={given} names no data; give a file, a folder or a name on the hub")
    if PYDOC in items:
        raise ConfigError(f"{setting}: {PYDOC} cannot be one of several; write {setting}={PYDOC}, or leave it out")
    if doubled := [item for item in items if items.count(item) > 1]:
        raise ConfigError(f"{setting} names {doubled[0]!r} twice; remove one of them")
    return [_source(item, subset, split, setting) for item in items]


def _source(path: str, subset: str | None, split: str, setting: str) -> Source:
    from datasets import load_dataset

    local = user_path(path)
    if is_dir(local) and (saved := [name for name in SAVED if is_file(local / name)]):
        return Source(
            path=path,
            setting=setting,
            kind="saved",
            place="files" if SAVED[0] in saved else "splits",
            tables=[("", lambda _: _open_saved(path, local, split))],
        )
    chosen = find_files(path, split=split, setting=setting)
    if not chosen.files:
        _check_name(path, setting)
        return Source(
            path=path,
            setting=setting,
            kind="hub",
            place="hub",
            tables=[("", cache(lambda streaming: load_dataset(path, subset, split=split, streaming=streaming)))],
        )
    files, kind = chosen.files, str(kind_of_file(chosen.files[0]))
    return Source(
        path=path,
        setting=setting,
        kind=kind,
        place="splits" if chosen.of_split else "files",
        files=files,
        note=chosen.note,
        tables=[(file.name, partial(_open_file, file, kind)) for file in files] if kind in TABLES else (),
    )


def _check_name(path: str, setting: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ConfigError(f"{setting}={path!r} is no file here, and no name on the hub: {first_line(error)}") from None


# -- what datasets reads ----------------------------------------------------------------------------------------------


def _open_file(file: Path, kind: str, _: bool) -> Table:
    from datasets import load_dataset

    if kind == "parquet":
        return _of_parquet(file)
    # Streaming in any case: else all rows would be copied into a cache of datasets'.
    return load_dataset(kind, data_files=[str(file)], split="train", streaming=True)


def _of_parquet(file: Path) -> Iterator[Any]:
    """Yield the rows of ``file`` in batches of Arrow's."""
    from pyarrow.parquet import ParquetFile

    # Not by datasets: threads of its reader abort a process that ends, for an error, before it has taken all rows.
    opened = ParquetFile(file)
    names = opened.schema_arrow.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"several columns are called {twice[0]!r}")
    yield from opened.iter_batches(_AT_ONCE)


def _open_saved(path: str, folder: Path, split: str) -> Table:
    from datasets import Dataset, load_from_disk

    table = load_from_disk(str(folder))
    if isinstance(table, Dataset):
        return table
    if split not in table:
        raise ConfigError(f"data.split={split!r}: {path!r} has {', '.join(map(repr, table))}")
    return table[split]


# -- Python's language reference --------------------------------------------------------------------------------------


def _pydoc(setting: str) -> Source:
    from datasets import Dataset

    part = 0 if setting == "data.path" else 1
    return Source(
        path=PYDOC, setting=setting, kind="pydoc", tables=[("", lambda _: Dataset.from_list(pydoc_topics()[part]))]
    )


def pydoc_topics() -> tuple[list[Row], list[Row]]:
    """Return Python's language reference as ``(training, validation)`` rows with a column ``text``.

    Topics quote each other at length. A paragraph of a held-out topic is taken out of all training topics, and no
    paragraph is trained twice, so the validation loss is about text the model has not been shown here.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[PYDOC_HELD_OUT - 1 :: PYDOC_HELD_OUT]
    seen: set[str] = set()
    # The held-out topics come first and keep shared paragraphs: else the loss would be about text that was trained on.
    validation = [_unseen(topics[name], seen) for name in held_out]
    training = [_unseen(topics[name], seen) for name in names if name not in set(held_out)]
    return [{"text": text} for text in training if text], [{"text": text} for text in validation if text]


def _unseen(topic: str, seen: set[str]) -> str:
    """Return ``topic`` without the paragraphs in ``seen``, whatever their indentation, and add the others to it."""
    kept = []
    for paragraph in topic.split("\n\n"):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)
