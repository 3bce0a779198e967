"""Sources of rows: files, folders whose names may tell splits, the hub, or Python's own documentation.

Mistakes in a path are errors here, before a model is loaded.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from lt_offload.errors import ConfigError, first_line
from lt_offload.finetune.data.rows import Row, RowFault, read_rows
from lt_offload.resources import is_dir, is_file, may_be_local, user_path

KINDS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".txt": "text", ".md": "text",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Kinds of files by their endings; those of text may be followed by ``.gz``."""
TABLES = ("parquet", "arrow")
_ENDINGS = f"{', '.join(KINDS)}, or .gz after one of text"
_SAVED = ("state.json", "dataset_dict.json")
"""Files that mark a folder that ``datasets`` has saved: one with rows, one with splits."""

_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words in names of files, and the split that each of them means, as ``datasets`` has them."""
_WORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_SPLITS)})(?:$|[-._ 0-9])")
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
"""A part of a split, whose name stands in front."""
_ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog|contributing|code_of_conduct|authors|data_?(set)?[-_]?card)"
    r"([-_.].*)?\.(md|txt)(\.gz)?|(config|state|dataset_infos?|dataset_dict)\.json"
)
"""Files about the data, not with them."""
_MOST_NAMED = 3

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
    """Rows of one path: those of its files, or of a table that ``datasets`` opens.

    Args:
        path: the setting's value.
        setting: its name.
        kind: of its files; ``hub`` or ``saved`` where ``datasets`` finds them.
        place: whether the rows are on the hub, in a folder with splits, or in files without.
        files: the files, none for a table of ``datasets``.
        note: their part of a folder that has more, in a few words.
        opened: opens the table of ``datasets``, ``streaming`` or not.
    """

    path: str
    setting: str
    kind: str
    place: Literal["hub", "splits", "files"] = "files"
    files: Sequence[Path] = ()
    note: str = ""
    opened: Callable[[bool], Table] | None = None

    @property
    def said(self) -> str:
        """The setting, and the part of a folder that is taken."""
        return f"{self.setting}={self.path!r}{f' ({self.note})' if self.note else ''}"

    def rows(self, *, streaming: bool) -> Iterator[tuple[str, Row | RowFault]]:
        """Yield one row after the other, each with its file and its number there, which begins at 1.

        With ``streaming`` no file is read as a whole, and data on the hub are fetched as they are read. Raises
        ``ConfigError`` if a file cannot be read, or only as a whole.
        """
        for file in self.files or (None,):
            if file is not None and self.kind not in TABLES:
                rows: Iterator[Row | RowFault] = read_rows(file, self.kind, self.setting, whole=not streaming)
            else:
                rows = self._of_table(file, streaming)
            for number, row in enumerate(rows, start=1):
                yield f"{file.name if file else ''} row {number}".lstrip(), row

    def first(self, *, streaming: bool) -> tuple[list[str], Row]:
        """Return the columns of the first rows, and the first one that can be read; ``ConfigError`` without one."""
        # All rows of a table have the same columns, and each one may have to be fetched. A row of
        # JSON may lack a key that others have, so the first one does not tell all columns.
        is_table = self.kind in TABLES or self.opened is not None
        rows = self.rows(streaming=streaming and is_table)
        looked_at = list(itertools.islice(rows, 1 if is_table else _LOOKED_AT))
        readable = [row for _, row in looked_at if isinstance(row, Mapping)]
        if not readable:
            why = f" ({looked_at[0][0]} {looked_at[0][1]})" if looked_at else "; it needs at least one"
            raise ConfigError(f"{self.setting}={self.path!r} has no rows that can be read{why}")
        return list(dict.fromkeys(name for row in readable for name in row)), readable[0]

    def _of_table(self, file: Path | None, streaming: bool) -> Iterator[Row]:
        try:
            table = self.opened(streaming) if self.opened is not None else _open_file(file, self.kind)
            # As Arrow's values: to decode pictures in other columns would take long, or a package that is not there.
            for batch in table if isinstance(table, Iterator) else table.with_format("arrow").iter(_AT_ONCE):
                for row in batch.to_pylist():
                    yield {name: _dense(value) for name, value in row.items()}
        except ConfigError:
            raise
        except Exception as error:  # the readers raise whatever their libraries do, each with another base class
            # The error at the bottom of a chain says what is wrong.
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            what = f" ({file.name}) cannot be read as {self.kind}" if file else " cannot be read"
            if self.kind == "hub":
                what = " is neither a file here nor a data set that the hub would give"
            raise ConfigError(f"{self.setting}={self.path!r}{what}: {first_line(root)}") from error


def _dense(value: Any) -> Any:
    """Return ``value`` without the keys that are null because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list) else value


def sources(path: str | Sequence[str], *, subset: str | None, split: str, setting: str) -> list[Source]:
    """Return the sources that ``path``, the value of ``setting``, names; nothing is read yet.

    ``subset`` is the configuration of a data set on the hub, and ``split`` that of one, or of a folder that has
    several; for validation, ``train`` means the split for that. Raises ``ConfigError`` if there is nothing there.
    """
    if path == PYDOC:
        part = 0 if setting == "data.path" else 1
        return [Source(path=PYDOC, setting=setting, kind="pydoc", opened=lambda _: _open_pydoc(part))]
    items = [path] if isinstance(path, str) else list(path)
    if not all(items) or not items:
        value = "''" if items else repr(path)
        raise ConfigError(f"{setting}={value} names no data; give a file, a folder or a name on the hub")
    if PYDOC in items:
        raise ConfigError(f"{setting}: {PYDOC} cannot be one of several; write {setting}={PYDOC}, or leave it out")
    if doubled := [item for item in items if items.count(item) > 1]:
        raise ConfigError(f"{setting} names {doubled[0]!r} twice; remove one of them")
    return [_source(item, subset, split, setting) for item in items]


def _source(path: str, subset: str | None, split: str, setting: str) -> Source:
    from datasets import load_dataset
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    local, where, source = user_path(path), f"{setting}={path!r}", partial(Source, path=path, setting=setting)
    if is_dir(local) and (saved := [name for name in _SAVED if is_file(local / name)]):
        opened = partial(_open_saved, path, local, split)
        return source(kind="saved", place="files" if _SAVED[0] in saved else "splits", opened=opened)
    if is_dir(local):
        files, of_split, note = _of_folder(path, local, split, setting)
        kind = _kind_of(files, f"{where} is a folder with")
        return source(kind=kind, place="splits" if of_split else "files", files=files, note=note)
    if is_file(local):
        if (known := kind_of_file(local)) is None:
            raise ConfigError(f"{where} is of an unknown kind; it should end with one of {_ENDINGS}")
        return source(kind=known, files=[local])
    if glob.has_magic(path):
        matches = [Path(name) for name in glob.glob(str(local), recursive=True)]
        if not matches and is_dir(local.parent):  # a folder with brackets in its name
            matches = [Path(name) for name in glob.glob(str(Path(glob.escape(str(local.parent))) / local.name))]
        if not matches:
            raise ConfigError(f"{where} matches no file (looked in {Path.cwd()})")
        files = sorted(file for file in matches if _has_rows(file))
        return source(kind=_kind_of(files, f"{where} matches"), files=files)
    if kind_of_file(local) is not None or may_be_local(path):
        raise ConfigError(f"{where} does not exist (looked in {Path.cwd()})")
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ConfigError(f"{where} is no file here, and no name on the hub: {first_line(error)}") from None
    # Opened once: the fingerprint of the table is looked up before its rows are read.
    table = cache(lambda streaming: load_dataset(path, subset, split=split, streaming=streaming))
    return source(kind="hub", place="hub", opened=table)


# -- files and folders ------------------------------------------------------------------------------------------------


def kind_of_file(file: Path) -> str | None:
    """Return the kind of a file by its ending, None if it has no known one."""
    packed = file.suffix.lower() == ".gz"
    kind = KINDS.get((file.with_suffix("") if packed else file).suffix.lower())
    return None if packed and kind in TABLES else kind


def _of_folder(path: str, folder: Path, split: str, setting: str) -> tuple[list[Path], bool, str]:
    """Return the data files in ``folder`` or one level below, whether they are those of one split, and a note."""
    where = f"{setting}={path!r}"
    files, beside, folders = _inside(folder, where)
    below: dict[Path, list[Path]] = {}
    if not files:
        below = {each: data for each in folders if (data := _inside(each, where)[0])}
        if len(below) > 1 and not all(_split_in(each.name) for each in below):
            names = ", ".join(repr(each.name) for each in below)
            raise ConfigError(
                f"{where} has no data files itself, but folders with some: {names}; name one of them, for example "
                f"--{setting} {Path(path) / next(iter(below)).name}"
            )
        files = [file for data in below.values() for file in data]
    if not files:
        raise ConfigError(
            f"{where} is a folder with no data files{f' beside {_named(beside)}' if beside else ''}, nor are any one "
            f"level below; they should end with one of {_ENDINGS}"
        )
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        name = _split_in(file.parent.name) if below else None
        splits.setdefault(name or _split_in(file.name), []).append(file)
    note = []
    # Texts have titles for names, in which such a word means a split only if every file has one.
    of_split = None not in splits if all(kind_of_file(file) == "text" for file in files) else splits.keys() != {None}
    if of_split:
        chosen = _chosen(splits, split, where, setting)
        note.append(f"split {chosen}")
        beside += [file for name, others in splits.items() if name != chosen for file in others]
        files = splits[chosen]
    if below:
        note.insert(0, f"in {', '.join(dict.fromkeys(file.parent.name for file in files))}")
    if beside:
        note.append(f"left out: {_named(beside, folder)}")
    return files, of_split, "; ".join(note)


def _inside(folder: Path, where: str) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the data files in ``folder``, files about them such as a README, and folders."""
    try:
        entries = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None
    for file in entries:
        # Folders of the hub's cache are such links: a file of the data would be missing without a word.
        if file.is_symlink() and not file.exists() and kind_of_file(file) is not None:
            raise ConfigError(f"{where}: the link {file.name!r} in it leads nowhere; mend or remove it")
    files = [file for file in entries if _has_rows(file)]
    about = [file for file in files if _ABOUT.fullmatch(file.name.lower())]
    return [file for file in files if file not in about], about, [each for each in entries if is_dir(each)]


def _has_rows(file: Path) -> bool:
    return kind_of_file(file) is not None and not file.name.startswith(".") and is_file(file)


def _split_in(name: str) -> str | None:
    """Return the split in the name of a file or folder: literally in that of a shard, else by the meaning of a word."""
    shard = _SHARD.match(name)
    word = _WORD.search((shard[1] if shard else name).lower().replace("_", "-"))
    if word is None:
        return None
    return shard[1] if shard and shard[1].lower() not in _SPLITS else _SPLITS[word[1]]


def _chosen(splits: dict[str | None, list[Path]], split: str, where: str, setting: str) -> str:
    wanted = split if split in splits else _SPLITS.get(split, split)
    if setting == "data.validation_path" and split == "train":
        wanted = next((name for name in ("validation", "test") if name in splits), wanted)
    if wanted not in splits:
        known = ", ".join(f"{name!r} ({_named(splits[name])})" for name in splits if name is not None)
        rest = f", and files of no split ({_named(splits[None])})" if None in splits else ""
        raise ConfigError(
            f"data.split={split!r}: {where} has the splits {known}{rest}; choose one of these splits, or name files "
            "instead of the folder"
        )
    return wanted


def _named(files: Sequence[Path], folder: Path | None = None) -> str:
    names = [str(file.relative_to(folder)) if folder is not None else file.name for file in files[:_MOST_NAMED]]
    more = f" and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return ", ".join(names) + more


def _kind_of(files: Sequence[Path], where: str) -> str:
    """Return the one kind of ``files``; raises ``ConfigError`` if there are several, or no files."""
    kinds = sorted({str(kind_of_file(file)) for file in files})
    if len(kinds) != 1:
        have = f"files of several kinds ({', '.join(kinds)})" if kinds else "no data files"
        raise ConfigError(f"{where} {have}; it should be one of {_ENDINGS}")
    return kinds[0]


# -- what datasets reads ----------------------------------------------------------------------------------------------


def _open_file(file: Path | None, kind: str) -> Table:
    from datasets import load_dataset
    from pyarrow.parquet import ParquetFile

    if kind == "arrow":
        # Streaming in any case: else all rows would be copied into a cache of datasets'.
        return load_dataset(kind, data_files=[str(file)], split="train", streaming=True)
    # Not by datasets: threads of its reader abort a process that ends, for an error, before it has taken all rows.
    table = ParquetFile(file)
    names = table.schema_arrow.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"several columns are called {twice[0]!r}")
    return table.iter_batches(_AT_ONCE)


def _open_saved(path: str, folder: Path, split: str, _: bool) -> Table:
    from datasets import Dataset, load_from_disk

    table = load_from_disk(str(folder))
    if isinstance(table, Dataset):
        return table
    if split not in table:
        raise ConfigError(f"data.split={split!r}: {path!r} has {', '.join(map(repr, table))}")
    return table[split]


# -- Python's language reference --------------------------------------------------------------------------------------


def _open_pydoc(part: int) -> Table:
    from datasets import Dataset

    return Dataset.from_list(pydoc_topics()[part])


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
