"""Rows of text files, one by one, and faults, with file, row and byte, in place of broken ones.

JSON and CSV are read with Python's own readers and not by ``datasets``: its readers change types to fit all rows,
cannot say which row is broken, and some broken files bring the process down.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lt_offload.errors import ConfigError

Row = Mapping[str, Any]


class RowFault(Exception):
    """A row that cannot be used, with the reason."""


def read_rows(file: Path, kind: str, setting: str, *, whole: bool = True) -> Iterator[Row | RowFault]:
    """Yield the rows of a file of a ``kind``, and a fault in the place of each row that is none.

    Where it may not be read as a ``whole``, a JSON file must have one object per line. Errors name ``setting``. Raises
    ``ConfigError`` if the file cannot be read at all.
    """
    where = f"{setting}: {str(file)!r}"
    if file.stat().st_size == 0:
        raise ConfigError(f"{where} is empty; it needs at least one row")
    try:
        if kind == "json":
            yield from _json_rows(file, where, whole)
        elif kind == "text":
            if (text := "".join(_decoded(file, where))).strip():
                yield {"text": text}
        else:
            yield from _table_rows(file, where, "\t" if kind == "tsv" else _delimiter(next(_decoded(file, where), "")))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{where} is no complete gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None


def _parsed(text: str | RowFault) -> Row | RowFault:
    try:
        return text if isinstance(text, RowFault) else _row(_JSON.decode(text.strip()))
    except RecursionError:
        return RowFault("is nested too deeply")
    except ValueError as error:
        return RowFault(f"is no JSON: {error}")


def _row(value: Any) -> Row | RowFault:
    """Return ``value``, which must be an object."""
    return value if isinstance(value, dict | RowFault) else RowFault(f"is {kind_of(value)}, not an object")


def kind_of(value: Any) -> str:
    """Return the kind of ``value``, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"a text ({value!r:.20})" if isinstance(value, str) else f"a number ({value!r:.20})"


def check_text(value: Any, name: str) -> str:
    """Return ``value``, which must be a text that can be written as UTF-8; raises ``RowFault`` if it is not."""
    if not isinstance(value, str):
        raise RowFault(f"{name} is {kind_of(value)}, not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowFault(f"{name} is not Unicode text: it has half of a surrogate pair") from None
    return value


def _lines(file: Path) -> Iterator[str | RowFault]:
    """Yield the lines of a file, which may be packed, and a fault in the place of each that is not UTF-8."""
    offset = 0
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
            try:
                yield content.decode()
            except UnicodeDecodeError as error:
                byte, start = content[error.start], offset + len(line) - len(content) + error.start
                guess = "it looks like UTF-16" if byte in (0xFE, 0xFF) and start == 0 else "it may be Latin-1"
                yield RowFault(
                    f"is not UTF-8 text: byte 0x{byte:02x} at offset {start} (line {number}); data must be UTF-8, "
                    f"{guess}: convert it, for example with iconv -t utf-8"
                )
            offset += len(line)


def _decoded(file: Path, where: str) -> Iterator[str]:
    """Yield the lines of a file, all of which must be UTF-8."""
    for line in _lines(file):
        if isinstance(line, RowFault):
            raise ConfigError(f"{where} {line}")
        yield line


# -- JSON -------------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowFault:
    """Return an object of JSON, or the fault of it or of one in it."""
    # Python's reader takes the last one of two equal keys without a word; which one was meant nobody knows.
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        return RowFault(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    for value in made.values():
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, RowFault):
                return item
    return made


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _json_rows(file: Path, where: str, whole: bool) -> Iterator[Row | RowFault]:
    rows = (line for line in _lines(file) if isinstance(line, RowFault) or line.strip(" \t\r\n"))
    first, second = itertools.islice(itertools.chain(rows, ("", "")), 2)
    # Endings say little: lists are called .jsonl, and lines .json. So the beginning decides: a file
    # of another name has rows in lines if its first line is an object, and is not all of the file.
    by_line = file.name.lower().removesuffix(".gz").endswith(".jsonl") or (
        second and isinstance(_parsed(first), Mapping)
    )
    if by_line and not (isinstance(first, str) and first.lstrip().startswith("[")):
        yield from map(_parsed, itertools.chain((line for line in (first, second) if line), rows))
        return
    if not whole:
        raise ConfigError(
            f"{where} is one list or object, which data.streaming=true cannot read row by row; write one object per "
            "line (.jsonl), or set data.streaming=false"
        )
    text = "".join(_decoded(file, where)).strip()
    try:
        content = _JSON.decode(text)
    except RecursionError:
        raise ConfigError(f"{where} cannot be read as json: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read as json: {error}") from None
    if isinstance(content, RowFault):
        raise ConfigError(f"{where} {content}; rename or remove one of them")
    if not isinstance(content, list | dict):
        raise ConfigError(f"{where} cannot be read as json: it holds {kind_of(content)} instead of rows")
    yield from map(_row, content if isinstance(content, list) else _rows_in(content, where))


def _rows_in(whole: dict[str, Any], where: str) -> Iterator[Any]:
    """Yield rows of an object of columns, or of one that is nothing but a list of rows by a name; another is a row."""
    lists = bool(whole) and all(isinstance(column, list) for column in whole.values())
    # One conversation in a file looks like a column of messages, but its items are turns and not lists of them.
    turns = [name for name in ("messages", "conversations") if isinstance(whole.get(name), list)]
    if not lists or any(isinstance(turn, dict) for name in turns for turn in whole[name]):
        yield whole
        return
    if len(whole) == 1:
        [rows] = whole.values()
        if any(isinstance(row, dict) for row in rows):
            yield from rows
            return
    lengths = {name: len(column) for name, column in whole.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise ConfigError(f"{where} has columns of different lengths ({said}); make them one length")
    for values in zip(*whole.values(), strict=True):
        yield dict(zip(whole, values, strict=True))


# -- CSV and TSV ------------------------------------------------------------------------------------------------------


# 131,072 characters unless it is told otherwise: a column with documents has more.
csv.field_size_limit(sys.maxsize)


def _delimiter(first: str) -> str:
    """Return the delimiter of a CSV file: a comma, unless its ``first`` line then has one column only.

    Programs in languages with a comma in their numbers write semicolons.
    """
    # A first line that is quoted and has a comma inside is one column: so the reader of CSV counts, not str.split.
    counts = {each: len(next(csv.reader([first], delimiter=each), [])) for each in (",", ";", "\t")}
    return next((delimiter for delimiter, count in counts.items() if count > 1), ",")


def _table_rows(file: Path, where: str, delimiter: str) -> Iterator[Row | RowFault]:
    """Yield rows; every value is text, as it stands there."""
    reader = csv.reader(_decoded(file, where), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        doubled = sorted({name for name in header if header.count(name) > 1})
        if doubled:
            raise ConfigError(f"{where} has the column {doubled[0]!r} twice in its first line; rename one of them")
        for values in reader:
            if len(values) == len(header):
                yield dict(zip(header, values, strict=True))
            elif values:
                yield RowFault(
                    f"has {len(values)} values, the first line has {len(header)} (it ends in line "
                    f"{reader.line_num}; a value with {delimiter!r} or a line break in it needs quotes)"
                )
    except csv.Error as error:
        raise ConfigError(f"{where} cannot be read as a table: line {reader.line_num}: {error}") from None
