"""The nearest names to one that was misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.65, most: int = 3) -> list[str]:
    """Return the names of ``known`` that ``name`` may have meant, best first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return a hint for the end of an error about ``name``; empty if nothing is near it."""
    close = nearest(name, known)
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""
