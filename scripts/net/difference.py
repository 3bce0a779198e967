"""The first difference between two files or folders, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yield the first difference of each file that is not the same below ``before`` and ``after``.

    Raises:
        SystemExit: if a folder is empty or absent, so that equality would say nothing.
    """
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*.*")} for folder in (before, after)]
    for folder, found in zip((before, after), names, strict=True):
        if not found:
            raise SystemExit(f"{folder} has no files; python -m scripts.net write {folder}")
    for name in sorted(set.union(*names)):
        where = [folder for folder, found in zip((before, after), names, strict=True) if name in found]
        if len(where) < 2:
            yield f"{name}: only in {where[0]}"
            continue
        texts = [(folder / name).read_text(encoding="utf-8") for folder in (before, after)]
        if texts[0] != texts[1]:
            yield f"{name}: {first_difference(*texts)}"


def first_difference(before: str, after: str) -> str:
    """Return the first difference of two unequal texts, JSON or lines, in words."""
    if before.startswith("{") and after.startswith("{"):
        found = _unequal("", json.loads(before), json.loads(after))
        place, was, now = next(found, ("the form of equal values", "other text", "this"))
        return f"{place} was {was}, is {now}"
    heading = ""
    for number, (was, now) in enumerate(zip_longest(before.splitlines(), after.splitlines()), 1):
        if was != now:
            under = f", of {heading.strip('# ')}" if heading else ""
            return f"line {number}{under}, was {_shown(was)}, is {_shown(now)}"
        if was.startswith("#"):
            heading = was
    return "the end of the last line is another"


def _unequal(place: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    """Yield where two values of a JSON file differ, and how."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inside = f"{place}.{key}" if place else key
            if key not in before or key not in after:
                yield inside, *("there" if key in one else "absent" for one in (before, after))
            else:
                yield from _unequal(inside, before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from _unequal(f"{place}[{index}]{_named(one)}", one, other)
        if len(before) != len(after):
            yield f"the length of {place}", str(len(before)), str(len(after))
    elif before != after:
        yield place, _shown(before), _shown(after)


def _named(item: Any) -> str:
    """Return what an op is, after its number."""
    if not isinstance(item, dict) or "kind" not in item:
        return ""
    words = (item["kind"], item.get("payload"), "of block", item.get("block"), "in step", item.get("step"))
    return f" ({' '.join(str(word) for word in words if word is not None)})" if "step" in item else ""


def _shown(value: Any) -> str:
    return "absent" if value is None else f'"{value}"' if isinstance(value, str) else json.dumps(value)
