"""Every wait of the engine is removed in turn, and something must notice: the happens-before checker or the numbers."""

from __future__ import annotations

import functools
import re

import pytest

from tests.support.engines import Case, differences, offloaded, plain
from tests.support.hostile.races import Race

ALL = ("keep", "recompute", "offload", "mixed", "reload")
CASES = (
    Case(family="llama-tied", options=ALL, places=("device", "paged", "host"), dropout=0.1),
    Case(options=("offload",), places=("device",)),
    Case(options=("mixed",), places=("paged",), roomy=True),
    Case(options=("keep",), places=("host",), roomy=True),
    Case(options=("keep",), places=("device",), roomy=True, optimizer="sgd-plain"),
    Case(options=ALL, places=("paged",), lora=True),
)

REDUNDANT = {
    ("update", "update"): "the host lane runs in order",
    ("offload state", "offload state"): "the d2h lane runs in order",
    ("offload weight", "offload weight"): "the d2h lane runs in order",
    ("offload activation", "prefetch activation"): "the compute lane has read what was fetched",
    ("prefetch state", "offload state"): "a state's range is released by its own copy to the host",
    ("prefetch state", "release"): "ranges of states are not shared in these plans",
    ("free", "write back"): "an engine that closes has awaited all copies before it frees what is left",
}


def kind(label: str) -> str:
    """``prefetch weight 3`` -> ``prefetch weight``."""
    for prefix in ("release", "free"):
        if label.startswith(prefix + " "):
            return prefix
    return re.sub(r"\d+", "", label).strip()


@functools.cache
def reference(index: int):  # noqa: ANN201
    return plain(CASES[index])


@functools.cache
def waits() -> dict[tuple[str, str], list[int]]:
    """Which kinds of waits occur, and in which cases."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, case in enumerate(CASES):
        seen = set()

        def note(task: str, event: str, seen: set[tuple[str, str]] = seen) -> bool:
            seen.add((kind(task), kind(event)))
            return False

        assert differences(reference(index), offloaded(case, ignore=note)) == []
        for pair in seen:
            found.setdefault(pair, []).append(index)
    return found


def noticed(index: int, pair: tuple[str, str]) -> bool:
    try:
        result = offloaded(CASES[index], ignore=lambda task, event: (kind(task), kind(event)) == pair)
    except Race:
        return True
    return differences(reference(index), result) != []


@pytest.mark.slow
def test_every_wait_is_needed_or_known_to_be_redundant() -> None:
    unnoticed = {
        pair for pair, cases in waits().items() if pair not in REDUNDANT and not any(noticed(i, pair) for i in cases)
    }
    assert unnoticed == set()


@pytest.mark.slow
def test_the_list_of_redundant_waits_is_true() -> None:
    assert set(REDUNDANT) <= set(waits())


def test_numbers_alone_notice_too() -> None:
    pair = ("compute", "prefetch weight")
    result = offloaded(CASES[1], ignore=lambda task, event: (kind(task), kind(event)) == pair, check=False, poison=True)
    assert differences(reference(1), result) != []
