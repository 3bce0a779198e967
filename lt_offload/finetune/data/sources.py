"""Where rows come from: files, the hub, or Python's own documentation.

Everything a user can get wrong about a path is found here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import Row
from lt_offload.finetune.data.rows import Places, read_json, usable
from lt_offload.resources import is_dir, is_file, user_path

PYDOC = "pydoc_topics"
"""Name of the source that every Python installation has: the language reference behind ``help()``."""
PYDOC_HELD_OUT = 8
"""Every so many topics, in alphabetical order, one is held out for validation."""

_BUILDERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_ENDINGS = ", ".join(_BUILDERS)


def load_rows(
    path: str,
    *,
    subset: str | None,
    split: str,
    columns: Sequence[str],
    setting: str,
    optional: Sequence[str] = (),
    skip_bad: bool = False,
) -> Sequence[Row]:
    """Return the rows behind ``path``: a file, a folder of files of one kind, or the name of a data set on the hub.

    Args:
        path: see above; text files become one row each.
        subset: name of a configuration of a hub data set.
        split: split of a hub data set.
        columns: columns that must be there.
        setting: name of the setting that ``path`` comes from, for errors.
        optional: columns that may be there.
        skip_bad: leave out rows without text, instead of refusing them.

    Raises:
        ConfigError: if there is nothing there, the file cannot be read, has no rows or lacks a column, or if rows have
            no text in it.
    """
    files = local_files(path, setting)
    places = Places(path, setting, files)
    rows = _read_files(places, columns) if files else _read_hub(path, subset, split, setting)
    if len(rows) == 0:
        raise ConfigError(f"{setting}={path!r} has no rows; it needs at least one")
    names = getattr(rows, "column_names", None) or list(dict.fromkeys(name for row in rows for name in row))
    missing = [column for column in columns if column not in names]
    if missing:
        raise ConfigError(
            f"{setting}={path!r} has no column {missing[0]!r}, it has {', '.join(map(repr, names)) or 'none'}; "
            "choose data.format and data.text_column to match"
        )
    result: Sequence[Row] = usable(rows, needed=columns, optional=optional, places=places, skip=skip_bad)
    return result


def local_files(path: str, setting: str) -> list[Path]:
    """Return the files at ``path``, none if it can only be a name on the hub.

    Raises:
        ConfigError: if it is a path and there is nothing to read.
    """
    local = user_path(path)
    if is_dir(local):
        files = sorted(file for file in local.iterdir() if file.suffix.lower() in _BUILDERS)
        kinds = {_BUILDERS[file.suffix.lower()] for file in files}
        if len(kinds) != 1:
            have = "files of several kinds" if kinds else "no data files"
            raise ConfigError(f"{setting}={path!r} is a folder with {have}; it should hold one of {_ENDINGS}")
        return files
    if is_file(local):
        if local.suffix.lower() not in _BUILDERS:
            raise ConfigError(f"{setting}={path!r} is of an unknown kind; it should end with one of {_ENDINGS}")
        return [local]
    if local.suffix.lower() in _BUILDERS or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise ConfigError(f"{setting}={path!r} does not exist (looked in {Path.cwd()})")
    return []


def _read_files(places: Places, columns: Sequence[str]) -> Any:
    path, setting, files = places.path, places.setting, places.files
    empty = [file for file in files if file.stat().st_size == 0]
    if empty:
        raise ConfigError(f"{setting}={path!r}: {empty[0].name} is empty")
    builder = _BUILDERS[files[0].suffix.lower()]
    if builder == "json":
        of_files = [read_json([file], setting, columns) for file in files]
        places.counts = [len(rows) for rows in of_files]
        return [row for rows in of_files for row in rows]
    from datasets import Dataset, concatenate_datasets, load_dataset

    if builder == "text":
        return Dataset.from_dict({"text": [text for file in files if (text := _read_text(file, setting)).strip()]})
    try:
        tables = [load_dataset(builder, data_files=[str(file)], split="train") for file in files]
        places.counts = [len(table) for table in tables]
        return concatenate_datasets(tables)
    except Exception as error:  # the readers raise whatever their libraries do, each with another base class
        raise ConfigError(f"{setting}={path!r} cannot be read as {builder}: {_root(error)}") from error


def _read_text(file: Path, setting: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: {str(file)!r} is not UTF-8 text: {error}") from None


def _read_hub(path: str, subset: str | None, split: str, setting: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(path, subset, split=split)
    except Exception as error:  # as above
        raise ConfigError(
            f"{setting}={path!r} is neither a file here nor a data set that the hub would give: {_root(error)}"
        ) from error


def _root(error: BaseException) -> str:
    """Return the first line of the error at the bottom of a chain: the one that says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def pydoc_topics() -> tuple[list[Row], list[Row]]:
    """Return Python's language reference as ``(training, validation)`` rows with a column ``text``.

    Topics quote each other at length. A paragraph of a held-out topic is taken out of all training topics, and no
    paragraph is trained twice, so the validation loss is about text the model has not been shown here.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[PYDOC_HELD_OUT - 1 :: PYDOC_HELD_OUT]
    seen: set[str] = set()
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
