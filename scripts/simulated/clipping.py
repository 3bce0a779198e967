"""What clipping by norm costs on cards, simulated: plans whose updates wait for all gradients, beside plans without.

    python -m scripts.simulated.clipping [--seconds S] [--output results]

``python -m scripts.bench.emulated --clipping`` measures the same on the emulated device, whose updates and computations
share the processor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_offload import Profile, profile_config
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.iteration.durations import norm_s
from lt_offload.units import format_seconds
from scripts.common import RESULTS, save

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

Result = dict[str, Any]


def cases(profile: Profile, seconds: float) -> Iterator[Result]:
    """Yield what is planned with and without clipping, for each number of micro-batches."""
    for window in WINDOWS:
        settings = Settings(accumulate=window, delayed=True, time_limit=seconds)
        free, waiting = make_plan(profile, replace(settings, delayed=False)), make_plan(profile, settings)
        yield {
            "window": window,
            "free_s": free.predicted.iteration_s,
            "clipped_s": waiting.predicted.iteration_s,
            "norm_s": norm_s(waiting, profile),
            "host_peak_bytes": waiting.predicted.host_peak_bytes,
            "planners": [free.planner, waiting.planner],
        }


def table(section: Callable[..., str], results: Sequence[Result]) -> str:
    """Return the table of ``results``, which ``section`` puts under a title; empty if there are none."""
    if not results:
        return ""
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
