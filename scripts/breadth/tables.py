"""The table of docs/models.md from what ``python -m scripts.breadth`` has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.docs.figures import origins

NAME = "breadth"
RUNS = {
    "smallest": "in the smallest memory that is named",
    "recomputing": "in the smallest without activations that travel",
    "from configuration": "planned from the configuration, without weights",
}
HEAD = ["family", "trained by plain PyTorch", *RUNS.values(), "all of these", "one of these at least"]
_GOOD = ("equal", "planned")
OPTIMIZERS = "optimizers"
"""The family that is told in a sentence."""


def table(section: Callable[..., str], results: Sequence[Mapping[str, Any]]) -> str:
    """Return how many kinds of models train, made by ``section``, and the names of those that are refused."""
    rows, said = [], []
    results = [result for result in results if result["settings"]["family"] != OPTIMIZERS]
    for result in results:
        family, kinds = result["settings"]["family"], result["figures"]["rows"]
        ends = {kind["name"]: {run["budget"]: run["outcome"] in _GOOD for run in kind["runs"]} for kind in kinds}
        left = [kind["name"] for kind in kinds if any(run["outcome"] == "not run" for run in kind["runs"])]
        plainly = [found for name, found in ends.items() if name not in left]
        among = [[found[budget] for found in plainly if budget in found] for budget in RUNS]
        counts = [str(sum(goods)) if goods else "" for goods in among]
        worst, best = (sum(how(found.values()) for found in plainly) for how in (all, any))
        rows.append([family, f"{len(plainly)} of {len(kinds)}", *counts, str(worst), str(best)])
        refused = [kind["name"] for kind in kinds if kind["name"] not in left and not all(ends[kind["name"]].values())]
        said += [f"- {family}, refused in one of these at least: {_listed(refused)}"] * bool(refused)
    if not rows:
        return ""
    transformers = f"transformers {results[0]['versions']['transformers']}"
    libraries = dict.fromkeys([transformers, *(result["settings"].get("library", transformers) for result in results)])
    title = f"Architectures of {', '.join(libraries)}, those with equal numbers"
    return "\n\n".join([section(title, "scripts.breadth --family FAMILY", results, HEAD, rows), "\n".join(said)])


def optimizers(results: Sequence[Mapping[str, Any]]) -> str:
    """Return how many optimizers of another package are equal to plain PyTorch, and how many are refused."""
    parts = []
    for result in (one for one in results if one["settings"]["family"] == OPTIMIZERS):
        ends = [{run["outcome"] for run in row["runs"]} for row in result["figures"]["rows"]]
        tried = [end for end in ends if "not run" not in end]
        refused = sum(end == {"refused"} for end in tried)
        other = len(tried) - refused - (equal := sum(end == {"equal"} for end in tried))
        parts.append(
            f"Of the {len(tried)} optimizers of {result['settings']['library']} that train a small model in a plain "
            f"loop, {equal} give plain PyTorch's numbers, {refused} are refused by name, before training"
            f"{f', {other} end otherwise' if other else ''} (`python -m scripts.breadth --family optimizers`; "
            f"{origins([result])})."
        )
    return "\n".join(parts)


ELSEWHERE = {
    "one batch per update": "DeepSpeed: SGD at its default stage (#8441); offloaded, loss off by 9.4e-2 (#8463)",
    "four batches per update": "DeepSpeed ZeRO-3: weights off by 1.3e-1 (#8443)",
}
"""Differences that a tracker of another tool reports for a case of ``muon.py``, as of September 2026."""


def muon(results: Sequence[dict[str, Any]]) -> str:
    """Return in how many budgets Muon is equal to plain training, by case, beside what others report."""
    if not results:
        return ""
    rows = ["| Muon: losses, weights, momentum | equal to plain training | reported elsewhere |", "|---|---|---|"]
    for row in (row for result in results for row in result["figures"]["rows"]):
        equal = sum(run["outcome"] == "equal" for run in row["runs"])
        rows.append(f"| {row['case']} | in {equal} of {len(row['runs'])} budgets | {ELSEWHERE.get(row['case'], '')} |")
    made = f"`torch.optim.Muon`, by `python -m scripts.breadth.muon` ({origins(results)})"
    return "\n".join([*rows, "", f"{made}; reports of September 2026, not run here."])


SCALED = {
    "by_lightning": 'Lightning, recipes: `precision="16-mixed"`',
    "by_trainer": "HF Trainer: `fp16=True`",
    "by_accelerate": 'accelerate: `mixed_precision="fp16"`',
    "in_own_loop": "own loop: `GradScaler`",
}
"""The libraries of ``fp16.py``, and what is set there."""


def fp16(results: Sequence[dict[str, Any]]) -> str:
    """Return in how many budgets fp16 with a scaled loss is equal to plain training, by library and case."""
    if not results:
        return ""
    [result] = results
    libraries = {row["library"]: row["rows"] for row in result["figures"]["rows"]}
    cases = [case["case"] for case in libraries["by_lightning"]]
    rows = [f"| budgets equal to plain training | {' | '.join(cases)} |", "|---" * (1 + len(cases)) + "|"]
    for library, said in SCALED.items():
        runs = [case["runs"] for case in libraries[library]]
        equal = [f"{sum(run['outcome'] == 'equal' for run in each)} of {len(each)}" for each in runs]
        rows.append(f"| {said} | {' | '.join(equal)} |")
    skipped = "/".join(map(str, sorted({case["skipped"] for each in libraries.values() for case in each})))
    made = f"`python -m scripts.breadth.fp16`; {origins(results)}"
    scope = f"Losses, weights, states, scales, skipped steps ({skipped} in each run)"
    return "\n".join([*rows, "", f"{scope}: {made}; HF and accelerate on a fake GPU."])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
