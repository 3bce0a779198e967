"""The table of docs/models.md from what ``python -m scripts.breadth`` has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

NAME = "breadth"
RUNS = {
    "smallest": "in the smallest memory that is named",
    "recomputing": "in the smallest without activations that travel",
    "from configuration": "planned from the configuration, without weights",
}
_GOOD = ("equal", "planned")


def table(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return how many kinds of models train, and what is said of each that does not, made by ``section``."""
    return "\n\n".join(_one(section, result) for result in results)


def _one(section: Callable[..., str], result: Mapping[str, Any]) -> str:
    kinds = result["figures"]["rows"]
    plainly = [kind for kind in kinds if all(run["outcome"] != "not run" for run in kind["runs"])]
    rows = []
    for budget, words in RUNS.items():
        if not any(run["budget"] == budget for kind in plainly for run in kind["runs"]):
            continue
        ends = Counter(run["outcome"] for kind in plainly for run in kind["runs"] if run["budget"] == budget)
        good = sum(ends[outcome] for outcome in _GOOD)
        others = ", ".join(f"{number} {outcome}" for outcome, number in ends.items() if outcome not in _GOOD)
        rows.append([words, f"{good} of {len(plainly)}", others or "none"])
    head = ["each kind", "equal to plain PyTorch, or planned", "others"]
    family = result["settings"]["family"]
    title = f"Architectures of transformers {result['versions']['transformers']}, {family}, four tiny layers each"
    misses = [f"- `{kind['name']}`: {said}" for kind in plainly if (said := _said(kind["runs"]))]
    left = [f"`{kind['name']}`" for kind in kinds if kind not in plainly]
    text = [section(title, f"scripts.breadth --family {family}", [result], head, rows)]
    text += ["\n".join(misses)] * bool(misses)
    text += [f"Not trained by plain PyTorch in such sizes either: {', '.join(left)}."] * bool(left)
    return "\n\n".join(text)


def _said(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what is said of the first run that is not good; "" if all are."""
    for run in runs:
        if run["outcome"] not in _GOOD:
            says = shorten(run["says"].replace("|", "\\|"), 260, placeholder=" ...")
            return f"{run['outcome']}, {RUNS.get(run['budget'], run['budget'])}: {says}"
    return ""
