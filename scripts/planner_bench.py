"""Times the OFFMATE program alone, on easy and hard cases of several depths; writes JSON.

    python scripts/planner_bench.py [--layers 32 40 80] [--output planner_bench.json]

The model is Llama 2 7B (fp32, 4 x 512 tokens) on an RTX 3060 with its depth changed, as in the tests.
``bench_planner.py`` times planning as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/unit/plan"))

from fixtures import GB, PAPER, llama7b_b4, with_bandwidth

from lt_offload.plan.offmate import OffmateConfig, lower_bound, no_offload_s, solve_offmate
from lt_offload.profile.types import Profile

CASES = ("paper", "engine", "tight", "slow link", "varied blocks")


def varied(profile: Profile, seed: int) -> Profile:
    """Return ``profile`` with the times and activations of every block changed by up to 40 %."""
    rng = np.random.default_rng(seed)
    blocks = []
    for block in profile.blocks:
        time_, saved = rng.uniform(0.6, 1.4, 2)
        options = [
            replace(
                option,
                forward_s=option.forward_s * time_,
                backward_s=option.backward_s * time_,
                saved_bytes=int(option.saved_bytes * saved),
                offload_bytes=int(option.offload_bytes * saved),
            )
            for option in block.options
        ]
        blocks.append(replace(block, options=tuple(options)))
    return replace(profile, blocks=tuple(blocks))


def case(name: str, layers: int) -> tuple[Profile, OffmateConfig]:
    """Return profile and configuration of a case."""
    profile = llama7b_b4(layers)
    if name == "slow link":
        profile = with_bandwidth(profile, 6)
    if name == "varied blocks":
        profile = varied(profile, seed=0)
    budget = int((8 if name == "tight" else 10) * GB)
    return profile, OffmateConfig(budget_bytes=budget, **(PAPER if name == "paper" else {}))


def measure(name: str, layers: int, repeats: int) -> dict[str, Any]:
    """Return the figures of one case."""
    profile, config = case(name, layers)
    seconds, bound_seconds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        solution = solve_offmate(profile, config)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        lower_bound(profile, config)
        bound_seconds.append(time.perf_counter() - start)
    return {
        "case": name,
        "layers": layers,
        "solve_s": round(min(seconds), 3),
        "bound_only_s": round(min(bound_seconds), 3),
        "iteration_s": round(solution.iteration_s, 4),
        "bound_s": round(solution.bound_s, 4),
        "gap": round(solution.iteration_s / solution.bound_s - 1, 5),
        "no_offload_s": round(no_offload_s(profile), 4),
        "options": dict(Counter(solution.options)),
    }


def main() -> None:
    """Run all cases and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 40, 80])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("planner_bench.json"))
    args = parser.parse_args()
    rows = []
    for layers in args.layers:
        for name in args.cases:
            rows.append(measure(name, layers, args.repeats))
            row = rows[-1]
            print(f"{layers:3d} layers  {name:14s} {row['solve_s']:7.2f} s   gap {100 * row['gap']:.2f} %", flush=True)
    machine = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
