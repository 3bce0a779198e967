"""Rows of JSON files, and which rows of any source have no text to learn from. Names file and row of what is wrong.

JSON is read here and not by ``datasets``: its reader changes types to fit all rows, cannot say which row is broken, and
some broken files bring the process down.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import Row

_log = logging.getLogger(__name__)
_MOST_NAMED = 3


def read_json(files: Sequence[Path], setting: str, columns: Sequence[str]) -> list[Row]:
    """Return the rows of JSON files, each a list of objects or one object per line, as far as ``columns`` go.

    Raises:
        ConfigError: if a file is no JSON, or one of its rows is no object.
    """
    return [row for file in files for row in _rows(file, setting, columns)]


def _rows(file: Path, setting: str, columns: Sequence[str]) -> Iterator[Row]:
    try:
        parsed = _parsed(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: {str(file)!r} is not UTF-8 text: {error}") from None
    except RecursionError:
        raise ConfigError(f"{setting}: {str(file)!r} cannot be read as json: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {str(file)!r} cannot be read as json: {error}") from None
    for number, row in enumerate(parsed, start=1):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{setting}: {str(file)!r} row {number} is {_kind(row)}, not an object such as "
                f"{json.dumps(dict.fromkeys(columns, '...'))}"
            )
        yield row


def _parsed(file: Path) -> list[Any]:
    """Return the items of a list, or of the lines; raise ``ValueError`` for what is neither."""
    text = file.read_text(encoding="utf-8-sig")
    begin = text.lstrip()[:1]
    if begin == "[" or (begin != "{" and file.suffix.lower() != ".jsonl"):
        whole = json.loads(text)
        if not isinstance(whole, list):
            raise ValueError(f"it holds {_kind(whole)} instead of rows")
        return whole
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # other separators may stand inside strings
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            try:
                return [json.loads(text)]  # one object over several lines
            except ValueError:
                raise ValueError(f"line {number}: {error}") from None
    return rows


def usable(rows: Any, *, needed: Sequence[str], optional: Sequence[str], places: Places, skip: bool) -> Any:
    """Return those of ``rows`` that have text in the columns ``needed``, and text or nothing in the ``optional`` ones.

    Args:
        rows: a list of objects, or a data set.
        needed: columns that must be text.
        optional: columns that may be missing or null.
        places: where the rows come from, for errors.
        skip: leave the others out and say so, instead of refusing all.

    Raises:
        ConfigError: if there are others, unless they are skipped; counts them and names the first.
    """
    bad = [(number, why) for number, row in enumerate(rows) if (why := _fault(row, needed, optional))]
    if not bad:
        return rows
    named = "; ".join(f"{places.name(number)}: {why}" for number, why in bad[:_MOST_NAMED])
    more = "; ..." if len(bad) > _MOST_NAMED else ""
    problem = f"{places.setting}={places.path!r}: {len(bad)} of {len(rows)} rows have no text to learn ({named}{more})"
    if not skip:
        raise ConfigError(f"{problem}; mend or remove them, or set data.skip_bad_rows=true to train without them")
    if len(bad) == len(rows):
        raise ConfigError(f"{problem}; data.skip_bad_rows=true leaves none: choose data.format and data.text_column")
    _log.warning("%s; they are left out", problem)
    left_out = {number for number, _ in bad}
    kept = [number for number in range(len(rows)) if number not in left_out]
    return rows.select(kept) if hasattr(rows, "select") else [rows[number] for number in kept]


class Places:
    """Where rows come from: files with so many rows each, or a data set on the hub.

    Args:
        path: the setting's value.
        setting: its name.
        files: the files, none for a data set on the hub.
    """

    def __init__(self, path: str, setting: str, files: Sequence[Path]) -> None:
        self.path, self.setting, self.files = path, setting, files
        self.counts: list[int] = []
        """Rows of each file, where there are several."""

    def name(self, number: int) -> str:
        """Return the file and the row in it, counted from 1, of row ``number``, counted from 0."""
        for file, count in zip(self.files, self.counts, strict=False):
            if number < count:
                return f"{file.name} row {number + 1}"
            number -= count
        return f"{self.files[0].name} row {number + 1}" if len(self.files) == 1 else f"row {number + 1}"


def _fault(row: Row, needed: Sequence[str], optional: Sequence[str]) -> str | None:
    for column in needed:
        value = row.get(column)
        if not isinstance(value, str):
            return f"{column} is {_kind(value)}" if column in row else f"{column} is missing"
        if not value.isascii() and _is_broken(value):
            return f"{column} is not Unicode text: it has half of a surrogate pair"
    for column in optional:
        value = row.get(column)
        if value is not None and (not isinstance(value, str) or _is_broken(value)):
            return f"{column} is {_kind(value)}"
    return None


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _kind(value: Any) -> str:
    """Return what ``value`` is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"a text ({value!r:.20})" if isinstance(value, str) else f"a number ({value!r:.20})"
