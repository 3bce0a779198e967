"""How long choosing a batch size takes, in plans for the chosen one, and how good the choice is.

python scripts/bench_batch.py [--layers 32 40] [--memory 10GB] [--scan]

The profile is that of Llama-2-7B on an RTX 3060 with published figures, or with more layers; what depends on the batch
is proportional to it. ``--scan`` plans for every size, to compare the choice with the best of them.
"""

from __future__ import annotations

import time
from typing import Any

from common import arguments, save

from lt_offload import InfeasibleError, Profile, solve
from lt_offload.plan import BatchChoice, choose_batch
from lt_offload.plan.batch.profiles import scaled
from lt_offload.units import format_seconds, parse_bytes
from scripts.papers.profiles import llama7b_b4

GOAL = 4.0
"""Plans that a choice may take."""
RAM = "256GB"


def main() -> int:
    """Measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 40])
    parser.add_argument("--memory", default="10GB")
    parser.add_argument("--most", type=int, default=32, help="largest batch size to consider")
    parser.add_argument("--scan", action="store_true", help="plan for every batch size, too")
    options = parser.parse_args()
    cases = []
    for layers in options.layers:
        profile = llama7b_b4(layers)
        began = time.perf_counter()
        choice = choose_batch(
            lambda size, profile=profile: scaled(profile, size),  # type: ignore[misc]
            most=options.most,
            memory=options.memory,
            host_memory=RAM,
        )
        seconds = time.perf_counter() - began
        case = _case(layers, choice, seconds, options.memory)
        if options.scan:
            case["scan"] = _scan(profile, options.memory, options.most)
            case["worse_than_best"] = max(point["samples_per_s"] for point in case["scan"]) / case["samples_per_s"] - 1
        cases.append(case)
        print(
            f"{layers:3d} layers: {choice.why}\n"
            f"           chosen in {format_seconds(seconds)}, {case['plans']:.2f} times one plan (goal: {GOAL:g})",
            flush=True,
        )
    what = {"memory_bytes": parse_bytes(options.memory), "most": options.most, "scan": options.scan}
    print(save("bench-batch", "bench-batch", what, {"cases": cases}, options.results))
    return 0


def _case(layers: int, choice: BatchChoice, seconds: float, memory: str) -> dict[str, Any]:
    """Return the figures of a choice; a plan for the chosen size is made once more, for its time."""
    began = time.perf_counter()
    solve(choice.profile, memory=memory, host_memory=RAM)
    single = time.perf_counter() - began
    return {
        "layers": layers,
        "batch_size": choice.batch_size,
        "samples_per_s": choice.batch_size / choice.plan.predicted.iteration_s,
        "choice_s": seconds,
        "plan_s": single,
        "plans": seconds / single,
        "goal": GOAL,
        "why": choice.why,
        "curve": [
            {
                "batch_size": point.batch_size,
                "samples_per_s": point.samples_per_s,
                "relaxed_samples_per_s": point.relaxed_samples_per_s,
            }
            for point in choice.curve
        ],
    }


def _scan(profile: Profile, memory: str, most: int) -> list[dict[str, Any]]:
    """Plan for all sizes that fit."""
    found = []
    for size in range(1, most + 1):
        try:
            plan = solve(scaled(profile, size), memory=memory, host_memory=RAM)
        except InfeasibleError:
            break
        found.append({"batch_size": size, "samples_per_s": size / plan.predicted.iteration_s})
    return found


if __name__ == "__main__":
    raise SystemExit(main())
