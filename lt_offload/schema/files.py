"""JSON for the three data structures that travel: profiles, plans and traces.

Validation is pydantic's: unknown keys, missing keys and wrong types are named with their path in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import ConfigDict

from lt_offload.arguments import checked
from lt_offload.errors import PlanError
from lt_offload.replacing import save_text

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
MOST_NUMBER = 2**60
"""Numbers beyond this do not fit the planners' arithmetic."""


class Strict:
    """The base of data structures whose files have no other keys than their fields."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def first_fault(error: ValidationError) -> str:
    """Return the place and the reason of the first fault, with the value where it is one."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "the document"
    value = f", not {first['input']!r:.40}" if isinstance(first["input"], int | float) else ""
    return f"{path}: {first['msg']}{value}"


def to_json(obj: Any) -> str:
    """Return the dataclass instance ``obj`` as indented JSON."""
    from pydantic import TypeAdapter

    return TypeAdapter(type(obj)).dump_json(obj, indent=1).decode()


def from_json(cls: type[T], text: str | bytes, *, source: str, schema: int) -> T:
    """Return a ``cls`` from JSON of this ``schema``; else ``PlanError``, which names the ``source``."""
    from pydantic import TypeAdapter, ValidationError

    try:
        document = json.loads(text)
        # Python's json reads NaN, Infinity and integers of any length, and no size, count or time is such a number.
        _check_numbers(document, ())
    except ValueError as error:
        raise PlanError(f"{source} is not a valid {cls.__name__} file: {error}") from None
    # Of the parser or of the check: both call themselves for every level.
    except RecursionError:
        raise PlanError(f"{source} is not a valid {cls.__name__} file: it is nested too deeply") from None
    version = document.get("schema") if isinstance(document, dict) else None
    # True and 2.0 equal numbers, and no release has written them as its version.
    if version != schema or isinstance(version, bool | float):
        raise PlanError(
            f"{source} has schema {version!r}, this release of lt_offload reads schema {schema} of {cls.__name__}; "
            "make it again with the release you have installed"
        )
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        raise PlanError(f"{source} is not a valid {cls.__name__} file: {first_fault(error)}") from None


@checked
def save_json(obj: Any, path: str | Path) -> Path:
    """Write ``obj`` to ``path``, making its folder, and return the path."""
    return save_text(path, to_json(obj) + "\n")


def _check_numbers(value: Any, where: tuple[str | int, ...]) -> None:
    """Raise ``ValueError`` for a number that no size, count or time has, anywhere in a JSON document."""
    if (
        isinstance(value, int | float) and not -MOST_NUMBER <= value <= MOST_NUMBER
    ):  # not a number is out of all bounds, too
        raise ValueError(f"{'.'.join(map(str, where)) or 'the document'}: {value!r:.20} is out of bounds")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        _check_numbers(one, (*where, key))


@checked
def load_json(
    cls: type[T], path: str | Path, *, schema: int, problems: Callable[[T], Iterator[str]] | None = None
) -> T:
    """Read a ``cls`` of this ``schema`` that has none of the ``problems``; else ``PlanError``, naming the file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {cls.__name__} file {str(path)!r}: {error.strerror}") from None
    loaded = from_json(cls, text, source=repr(str(path)), schema=schema)
    problem = None if problems is None else next(problems(loaded), None)
    if problem is not None:
        raise PlanError(f"{str(path)!r} is not a valid {cls.__name__} file: {problem}; make it again")
    return loaded
