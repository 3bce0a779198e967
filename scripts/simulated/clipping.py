"""What clipping by norm costs on cards, simulated: plans whose updates wait for all gradients, beside plans without.

    python -m scripts.simulated.clipping [--seconds S] [--output results]

With one micro-batch per update, which pays for it, also what it would take if updates did not wait (``early.py``).
``python -m scripts.bench.emulated --clipping`` measures the same on the emulated device, whose updates and computations
share the processor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lt_offload import Profile, profile_config
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.iteration.durations import norm_s
from lt_offload.units import format_bytes, format_seconds
from scripts.common import RESULTS, save
from scripts.simulated import early

CARD, LENGTH = "rtx-3060-12gb", 512
ADAPTERS = {"r": 16, "target_modules": "all-linear"}
MODELS: tuple[tuple[str, str, int, dict[str, Any] | None], ...] = (
    ("llama2-7b", "float32", 4, None),
    ("phi3-mini", "bfloat16", 2, None),
    ("llama3-8b", "bfloat16", 8, ADAPTERS),
)
"""Configurations, their dtypes, samples per micro-batch and adapters."""
WINDOWS = (1, 4)
"""Micro-batches per update."""

_GOOD = 1.02
"""A ratio that is hardly worth improving."""

Result = dict[str, Any]


def cases(profile: Profile, seconds: float) -> Iterator[Result]:
    """Yield what is planned with and without clipping, for each number of micro-batches."""
    for window in WINDOWS:
        settings = Settings(accumulate=window, delayed=True, time_limit=seconds)
        free, waiting = make_plan(profile, replace(settings, delayed=False)), make_plan(profile, settings)
        # Waiting hardly costs anything elsewhere.
        costs = window == 1 and waiting.predicted.iteration_s > _GOOD * free.predicted.iteration_s
        found = early.figures(profile, waiting, settings) if costs else {}
        yield {
            "window": window,
            "free_s": free.predicted.iteration_s,
            "clipped_s": waiting.predicted.iteration_s,
            "norm_s": norm_s(waiting, profile),
            "host_peak_bytes": waiting.predicted.host_peak_bytes,
            "planners": [free.planner, waiting.planner],
            "early": {how: asdict(plan) for how, plan in found.items()},
        }


def tables(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return the tables of ``results``, which ``section`` puts under titles."""
    return f"{_of_plans(section, results)}\n\n{_on_paper(section, results)}"


def _on_paper(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return what it would take if updates did not wait."""
    cases = [case for result in results for case in result["figures"]["cases"] if case["early"]]
    ways = list(dict.fromkeys(how for case in cases for how in case["early"]))
    rows = [
        [
            case["model"],
            format_seconds(case["free_s"]),
            format_seconds(case["clipped_s"]),
            *(f"{format_seconds(plan['seconds'])}, {format_bytes(plan['ram'])}" for plan in case["early"].values()),
        ]
        for case in cases
    ]
    head = ["model, batch", "without clipping", "updates wait", *ways]
    title = "The same where nothing is clipped, if updates did not wait and old values were kept in RAM: not built"
    return section(title, "scripts.simulated.clipping", results, head, rows)


def _of_plans(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return what plans take with clipping and without."""
    rows = [
        [
            case["model"],
            str(case["window"]),
            format_seconds(case["free_s"]),
            format_seconds(case["clipped_s"]),
            f"{case['clipped_s'] / case['free_s']:.2f}",
            format_seconds(case["norm_s"]),
        ]
        for result in results
        for case in result["figures"]["cases"]
    ]
    head = [
        "model, batch",
        "micro-batches per update",
        "update",
        "with clipping",
        "ratio",
        "of it reading for the norm",
    ]
    return section(f"Clipping by norm on an {CARD}, simulated", "scripts.simulated.clipping", results, head, rows)


def main() -> None:
    """Plan, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="what a plan may take")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    found: list[Result] = []
    for model, dtype, samples, lora in MODELS:
        profile = profile_config(
            model, batch_size=samples, sequence_length=LENGTH, dtype=dtype, hardware=CARD, lora=lora
        )
        name = f"{model} {dtype}{', LoRA' if lora else ''}, {samples} x {LENGTH}"
        for case in cases(profile, options.seconds):
            found.append(case | {"model": name})
            print(found[-1], flush=True)
    settings = {"card": CARD, "seconds": options.seconds}
    print(save("bench-clipping-cards", "bench-clipping-cards", settings, {"cases": found}, options.output))


if __name__ == "__main__":
    main()
