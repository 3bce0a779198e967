"""The nearest names to one that was misspelled, and the first of many."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.65, most: int = 3) -> list[str]:
    """Return the names of ``known`` that ``name`` may have meant, best first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def some(names: Sequence[str], *, most: int = 3) -> str:
    """Return the first of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", cutoff: float = 0.65, most: int = 3) -> str:
    """Return a hint for the end of an error about ``name``; empty if nothing is near it."""
    close = nearest(name, known, cutoff=cutoff, most=most)
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""
