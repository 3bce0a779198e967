"""Ways to break text and data, each drawn from a generator of its own."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, -(10**12), 0.5, -0.0, 1e308, 1e-300, float("nan"),
    float("inf"), "", " ", "x", "null", "12GB", "80%", "2001-01-01", "2001-99-99", "\u2028", "é", "../..", "/", "~",
    [], [[]], {}, {"a": 1}, [None], ["x", 3], {"": {}}, "a" * 300, "0x10", "1e3", "keep", "host", "float32",
)  # fmt: skip
TOKENS = (
    "null", "~", "{", "}", "[", "]", ":", ": ", "- ", "\n", "\t", "  ", "&a ", "*a", "<<: *a", "!!binary ",
    "!!python/object:x ", "2001-01-01", "2001-99-99", "---\n", "...\n", "'", '"', "#", "%", "@", "|", ">", "?", "\x00",
    "\ufeff", "\U0001f600", "\ud83d", "1e400", ".nan", ".inf", "0o7", "yes", "base: ", "[" * 6, "a" * 300, "=", ",",
    "--", "\\", "\x85",
)  # fmt: skip


def text(random: Random, whole: str) -> str:
    """Return ``whole`` with one to four changes to its characters."""
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(whole))
        until = min(len(whole), at + random.choice((0, 0, 1, 2, 5, 40)))
        token = random.choice((*TOKENS, whole[at : at + 20], ""))
        whole = whole[:at] + token + whole[until:]
    return whole


def data(random: Random, whole: Any, changes: int | None = None) -> Any:
    """Return a copy of JSON data with one to three changes to what stands somewhere in it."""
    whole = copy.deepcopy(whole)
    for _ in range(changes or random.randint(1, 3)):
        whole = _changed(random, whole)
    return whole


def _changed(random: Random, whole: Any) -> Any:
    places = list(_places(whole))
    if not places:
        return random.choice(JUNK)
    parent, key = random.choice(places)
    value = parent[key]
    change = random.choice(("junk", "number", "number", "number", "delete", "double", "swap", "add"))
    if change == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        by = random.choice((1, -1, 2, 512, -512, 10**6, value, -value, -2 * value))
        parent[key] = value + by
    elif change == "delete":
        del parent[key]
    elif change == "double" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    elif change == "swap":
        other, there = random.choice(places)
        one, two = parent[key], other[there]
        if isinstance(one, dict | list) or isinstance(two, dict | list):
            parent[key] = copy.deepcopy(two)  # a swap could put one into itself
        else:
            parent[key], other[there] = two, one
    elif change == "add" and isinstance(parent, dict):
        parent[random.choice(("x", "", f"{key}s", "schema", "base"))] = copy.deepcopy(value)
    else:
        parent[key] = copy.deepcopy(random.choice(JUNK))
    return whole


def _places(value: Any) -> Any:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield value, key
        yield from _places(inner)
