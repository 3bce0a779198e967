"""Sources of rows: files, the hub, or Python's own documentation.

Everything a user can get wrong about a path is found here, before a model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.files import SAVED, TABLES, find_files, kind_of_file
from lt_offload.finetune.data.rows import Places, Row, RowFault, parse, read_rows
from lt_offload.resources import is_dir, is_file, user_path

if TYPE_CHECKING:
    from datasets import Dataset

PYDOC = "pydoc_topics"
"""Name of the source that every Python installation has: the language reference behind ``help()``."""
PYDOC_HELD_OUT = 8
"""One topic in this many, in alphabetical order, is held out for validation."""

_LOOKED_AT = 1000
"""Rows whose keys are the columns of JSON data."""
_CHUNK_ROWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows of one path: read from its files as JSON text, or a table of ``datasets``.

    Args:
        places: names of files and rows.
        kind: of its files; ``hub`` or ``saved`` where ``datasets`` finds them.
        open: returns the table, ``streaming`` or not.
    """

    places: Places
    kind: str
    open: Callable[[bool], Any] | None = None

    @property
    def is_table(self) -> bool:
        """Whether rows come in Arrow's types, in which a missing key is null."""
        return self.open is not None

    def table(self) -> Dataset:
        """Return all rows; those of text files in the columns ``row``, which is JSON, and ``fault``.

        Raises:
            ConfigError: if a file cannot be read, or there are no rows.
        """
        table = self.open(False) if self.open is not None else self._read()
        if len(table) == 0:
            raise ConfigError(f"{self.places.setting}={self.places.path!r} has no rows; it needs at least one")
        return table

    def rows(self, *, whole: bool = False) -> Iterator[Row | RowFault]:
        """Yield one row after the other, without holding them all; with ``whole``, a file may be read as a whole.

        Raises:
            ConfigError: if a file cannot be read, or only as a whole.
        """
        if self.open is not None:
            # Rows of a stream are read here and not where it was opened, so that errors come here, too.
            yield from _failing_well(self.open(True), self.places)
            return
        counts = self.places.counts = []
        for file in self.places.files:
            counts.append(0)
            for text in read_rows(file, self.kind, self.places.setting, whole=whole):
                counts[-1] += 1
                yield _parsed(text)

    def _read(self) -> Dataset:
        import pyarrow as pa
        from datasets import Dataset

        # Large strings: the offsets of others have 32 bits, which end at 2 GB of text.
        schema = pa.schema({"row": pa.large_string(), "fault": pa.large_string()})
        batches = []
        self.places.counts.clear()
        for file in self.places.files:
            count = 0
            of_file = read_rows(file, self.kind, self.places.setting)
            while chunk := list(itertools.islice(of_file, _CHUNK_ROWS)):
                batches.append(text_batch(chunk, schema))
                count += len(chunk)
            self.places.counts.append(count)
        return Dataset(pa.Table.from_batches(batches, schema))


def text_batch(rows: Iterable[str | RowFault], schema: Any = None) -> Any:
    """Return rows as a batch of Arrow with the columns ``row`` and ``fault``."""
    import pyarrow as pa

    rows = list(rows)
    return pa.record_batch(
        [
            pa.array([None if isinstance(row, RowFault) else row for row in rows], pa.large_string()),
            pa.array([str(row) if isinstance(row, RowFault) else None for row in rows], pa.large_string()),
        ],
        schema=schema or pa.schema({"row": pa.large_string(), "fault": pa.large_string()}),
    )


def rows_of(batch: Any) -> list[Row | RowFault]:
    """Return the rows in a batch of a source's table."""
    if batch.column_names != ["row", "fault"]:
        return list(batch.to_pylist())
    texts, faults = batch.column("row").to_pylist(), batch.column("fault").to_pylist()
    return [_parsed(RowFault(fault) if text is None else text) for text, fault in zip(texts, faults, strict=True)]


def first_row(rows: Iterable[Row | RowFault], places: Places) -> tuple[list[str], Row]:
    """Return the columns of some rows, and the first one.

    Raises:
        ConfigError: if none of them is a row.
    """
    # A row of JSON may lack a key that others have, so the first one does not tell all columns.
    looked_at = list(itertools.islice(rows, _LOOKED_AT))
    found = [row for row in looked_at if isinstance(row, Mapping)]
    if not found:
        why = f" ({places.name(0)} {looked_at[0]})" if looked_at else ""
        raise ConfigError(f"{places.setting}={places.path!r} has no rows that can be read{why}")
    return list(dict.fromkeys(name for row in found for name in row)), found[0]


def sources(path: str | Sequence[str], *, subset: str | None, split: str, setting: str) -> list[Source]:
    """Return the sources that ``path`` names; nothing is read yet.

    Args:
        path: file, folder of files of one kind, glob, or the name of a data set on the hub; or a list of these.
        subset: name of a configuration of a hub data set.
        split: split of a hub data set, or of a folder that has several.
        setting: name of the setting that ``path`` comes from, for errors.

    Raises:
        ConfigError: if there is nothing there.
    """
    return [_source(item, subset, split, setting) for item in _listed(path, setting)]


def places_of(path: str | Sequence[str], *, split: str, setting: str) -> set[Literal["hub", "splits", "files"]]:
    """Return what the data at ``path`` are: on the hub, a folder with splits, or files without; nothing is read.

    Raises:
        ConfigError: if one of them is a path and there is nothing to read, or no such split.
    """
    return {_place(item, split, setting) for item in _listed(path, setting)}


def _place(path: str, split: str, setting: str) -> Literal["hub", "splits", "files"]:
    found = find_files(path, split=split, setting=setting)
    if found.files or is_file(user_path(path) / SAVED[0]):
        return "splits" if found.of_split else "files"
    if is_dir(user_path(path)):
        return "splits"
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ConfigError(f"{setting}={path!r} is no file here, and no name on the hub: {first_line(error)}") from None
    return "hub"


def _listed(path: str | Sequence[str], setting: str) -> list[str]:
    items = [path] if isinstance(path, str) else list(path)
    if not items:
        raise ConfigError(f"{setting}={path!r} names no data; give a file, a folder or a name on the hub")
    if not all(items):
        raise ConfigError(f"{setting}='' names no data; give a file, a folder or a name on the hub")
    if PYDOC in items:
        raise ConfigError(f"{setting}: {PYDOC} cannot be one of several; write {setting}={PYDOC}, or leave it out")
    if doubled := [item for item in items if items.count(item) > 1]:
        raise ConfigError(f"{setting} names {doubled[0]!r} twice; remove one of them")
    return items


def _source(path: str, subset: str | None, split: str, setting: str) -> Source:
    local = user_path(path)
    if is_dir(local) and any(is_file(local / name) for name in SAVED):
        places = Places(path, setting, [])
        return Source(places=places, kind="saved", open=lambda streaming: _open_saved(places, local, split, streaming))
    found = find_files(path, split=split, setting=setting)
    places = Places(path, setting, found.files, found.note)
    if not found.files:
        return Source(
            places=places, kind="hub", open=lambda streaming: _open_hub(places, subset, split, streaming=streaming)
        )
    kind = kind_of_file(found.files[0])
    assert kind is not None
    if kind in TABLES:
        return Source(places=places, kind=kind, open=lambda streaming: _open_tables(places, kind, streaming))
    return Source(places=places, kind=kind)


def _parsed(row: str | RowFault) -> Row | RowFault:
    if isinstance(row, RowFault):
        return row
    try:
        return parse(row)
    except RowFault as fault:
        return fault


# -- what datasets reads ----------------------------------------------------------------------------------------------


def _open_tables(places: Places, kind: str, streaming: bool) -> Any:
    from datasets import concatenate_datasets, load_dataset

    for file in places.files:
        if file.stat().st_size == 0:
            raise ConfigError(f"{places.setting}: {str(file)!r} is empty; it needs at least one row")
    try:
        for file in places.files:
            _check_columns(file, kind, places.setting)
        if streaming:
            files = list(map(str, places.files))
            return load_dataset(kind, data_files=files, split="train", streaming=True)
        # File by file, as rows are named by file and number, for which each file's rows have to be counted.
        tables = [load_dataset(kind, data_files=[str(file)], split="train") for file in places.files]
        places.counts[:] = [len(table) for table in tables]
        return concatenate_datasets(tables)
    except ConfigError:
        raise
    except Exception as error:  # the readers raise whatever their libraries do, each with another base class
        raise ConfigError(f"{places.setting}={places.path!r} cannot be read as {kind}: {_root(error)}") from error


def _check_columns(file: Path, kind: str, setting: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    # Arrow lets two columns have one name; a row, which is a mapping, would keep one of the two.
    if kind == "parquet":
        names = pyarrow.parquet.read_schema(file).names
    else:
        with pa.memory_map(str(file)) as mapped:
            try:
                # datasets writes streams; other programs write the form with a table of contents at the end.
                names = pa.ipc.open_stream(mapped).schema.names
            except pa.ArrowInvalid:
                mapped.seek(0)
                names = pa.ipc.open_file(mapped).schema.names
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise ConfigError(f"{setting}: {str(file)!r} has the column {doubled[0]!r} twice; rename one of them")


def _open_saved(places: Places, folder: Path, split: str, streaming: bool) -> Any:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # as above
        raise ConfigError(f"{places.setting}={places.path!r} cannot be read: {_root(error)}") from error
    if not isinstance(found, Dataset):
        if split not in found:
            raise ConfigError(f"data.split={split!r}: {places.path!r} has {', '.join(map(repr, found))}")
        found = found[split]
    return found.to_iterable_dataset() if streaming else found


def _open_hub(places: Places, subset: str | None, split: str, *, streaming: bool) -> Any:
    from datasets import load_dataset

    try:
        if streaming:
            return load_dataset(places.path, subset, split=split, streaming=True)
        return load_dataset(places.path, subset, split=split)
    except Exception as error:  # as above
        raise ConfigError(
            f"{places.setting}={places.path!r} is neither a file here nor a data set that the hub would give: "
            f"{_root(error)}"
        ) from error


def _failing_well(rows: Iterable[Row], places: Places) -> Iterator[Row]:
    try:
        yield from rows
    except Exception as error:  # as above
        raise ConfigError(f"{places.setting}={places.path!r} cannot be read: {_root(error)}") from error


def _root(error: BaseException) -> str:
    """Return the first line of the error at the bottom of a chain: the one that says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


# -- Python's language reference --------------------------------------------------------------------------------------


def pydoc() -> tuple[Source, Source]:
    """Return Python's language reference as sources of training and validation rows."""
    training, validation = pydoc_topics()
    return _given(training, "data.path"), _given(validation, "data.validation_path")


def _given(rows: list[Row], setting: str) -> Source:
    from datasets import Dataset

    return Source(places=Places(PYDOC, setting, []), kind="pydoc", open=lambda streaming: Dataset.from_list(rows))


def pydoc_topics() -> tuple[list[Row], list[Row]]:
    """Return Python's language reference as ``(training, validation)`` rows with a column ``text``.

    Topics quote each other at length. A paragraph of a held-out topic is taken out of all training topics, and no
    paragraph is trained twice, so the validation loss is about text the model has not been shown here.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[PYDOC_HELD_OUT - 1 :: PYDOC_HELD_OUT]
    seen: set[str] = set()
    # Those that are held out come first and keep what several topics say: training does without it.
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
