"""How long planning takes, and how good the plans are: Llama-2-7B with more or fewer layers, from its configuration.

Beside it what else people wait for: a simulation (goal for 40 layers: 0.1 s), a report (80 layers: 2 s).

python -m scripts.bench.planner [--layers 32 40 80] [--hardware rtx-3060-12gb] [--memory 11GB]
python -m scripts.bench.planner --gaps [--seconds 60]
python -m scripts.bench.planner --before FILE

``--gaps``: how near plans come to the bound where memory is short; those of the recipes are in results/recipes.json.
Everything is simulated. No plan of any method can beat the bound; part of a gap is that it cannot be reached. Planning
is timed by the clock and in seconds of the processor; a busy machine needs more ``--seconds`` for the same plans.

``--before``: what was saved earlier, in FILE, a bench-gaps.json or a recipes.json, beside what that file of results/
has now, with the worst case last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lt_offload
from lt_offload.profiling.from_config import load_model_config
from lt_offload.report.plan_page import write_plan_report
from lt_offload.units import format_bytes, format_seconds, parse_bytes
from scripts.common import arguments, read_json, save
from scripts.papers.profiles import GB, llama7b_b4
from scripts.planning import Stopwatch, figures_of, gap, model_bytes, shown

GOALS = {40: 5.0, 80: 15.0}
"""Seconds of the processor, by number of layers."""

# -- gaps ------------------------------------------------------------------------------------------------------------

TIGHT = ((8, 11.7), (7, 12.8), (6, 14.1))
"""GB of device memory for Llama-2-7B in fp32, batch 4, on the papers' RTX 3060, and the seconds that are the goal."""
BLOOM_GOAL_S = 1.29


def tight(limit_s: float) -> Iterator[dict[str, Any]]:
    """Plan where memory is short."""
    llama = llama7b_b4(32)
    for memory, goal in TIGHT:
        yield _case(f"llama7b_b4, fp32, {memory} GB", llama, memory, goal, limit_s)
    bloom = lt_offload.profile_config(
        load_model_config("bloom-3b"), dtype="bfloat16", hardware="rtx-3060-12gb", batch_size=4, sequence_length=512
    )
    yield _case("bloom-3b, bf16, 4 x 512, 6 GB", bloom, 6, BLOOM_GOAL_S, limit_s)


def _case(name: str, profile: lt_offload.Profile, gigabytes: int, goal: float, limit_s: float) -> dict[str, Any]:
    watch = Stopwatch()
    plan = lt_offload.solve(profile, memory=int(gigabytes * GB), host_memory=int(128 * GB), solver_time_limit=limit_s)
    return {"name": name, "goal_s": goal, **figures_of(plan), **watch.figures()}


def _show(case: dict[str, Any]) -> None:
    goal = f" (goal {case['goal_s']:g} s)" if case["goal_s"] else ""
    print(
        f"{case['name']}: {format_seconds(case['iteration_s'])}{goal}, gap {shown(case['gap'])}, "
        f"{format_bytes(case['host_peak_bytes'])} of RAM, by {case['planner']}, planned in "
        f"{format_seconds(case['plan_s'])} ({format_seconds(case['plan_cpu_s'])} of the processor)",
        flush=True,
    )


def gaps(limit_s: float, folder: Path) -> int:
    """Plan, print and save."""
    cases = []
    for case in tight(limit_s):
        cases.append(case)
        _show(case)
        save("bench-gaps", "bench-gaps", {"seconds": limit_s}, {"cases": cases}, folder)
    return 0


def compared(before: Path, after: Path) -> str:
    """Return a table of what two runs have saved, the case that became slowest last."""
    saved = (read_json(path)["figures"] for path in (before, after))
    old, new = ({case["name"]: case for case in one["cases"]} if "cases" in one else one for one in saved)
    head = "| case | iteration, simulated | times as long | gap to bound | RAM | processor time |"
    rows: list[tuple[float, str]] = []
    for name, case in new.items():
        pair = (old[name], case) if name in old else (case,)
        ratio = case["iteration_s"] / pair[0]["iteration_s"]
        cells = (
            [f"{each['iteration_s']:.4g} s" for each in pair],
            [f"{ratio:.3f}"],
            [shown(each.get("gap")) for each in pair],
            [format_bytes(each["host_peak_bytes"]) for each in pair],
            [format_seconds(each["plan_cpu_s"]) for each in pair],
        )
        rows.append((ratio, f"| {name} | {' | '.join(' -> '.join(values) for values in cells)} |"))
    gone = [f"| {name} | not planned again | | | | |" for name in old if name not in new]
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|", *(row for _, row in sorted(rows)), *gone])


# -- time ------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 40, 80])
    parser.add_argument("--config", default="llama2-7b")
    parser.add_argument("--hardware", default="rtx-3060-12gb")
    parser.add_argument("--memory", default="11GB")
    parser.add_argument("--host-memory", default="256GB", help="enough for 80 layers, so that RAM does not decide")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of a plan (default 30)")
    parser.add_argument("--before", type=Path, metavar="FILE", help="an earlier one of a file of results")
    options = parser.parse_args()
    if options.before:
        print(compared(options.before, options.results / options.before.name))
        return 0
    if options.gaps:
        return gaps(options.seconds, options.results)
    shape = {"batch_size": options.batch_size, "sequence_length": options.sequence_length}
    cases = []
    for layers in options.layers:
        config = load_model_config(options.config)
        config.num_hidden_layers = layers
        began = time.perf_counter()
        profile = lt_offload.profile_config(config, dtype="bfloat16", hardware=options.hardware, **shape)
        profiled = time.perf_counter()
        watch, room = Stopwatch(), {"memory": options.memory, "host_memory": options.host_memory}
        plan = lt_offload.solve(profile, **room, solver_time_limit=options.seconds)
        planned, done = watch.figures(), time.perf_counter()
        trace = lt_offload.simulate(plan, profile)
        simulated = time.perf_counter()
        with TemporaryDirectory() as folder:
            page = write_plan_report(Path(folder) / "plan.html", plan, profile, trace)
            drawn = time.perf_counter()
            page_bytes = page.stat().st_size
        case = {
            "layers": layers,
            "blocks": len(profile.blocks),
            "ops": len(plan.ops),
            "profile_s": profiled - began,
            **planned,
            "goal_s": GOALS.get(layers),
            "planner": plan.planner,
            "simulate_s": simulated - done,
            "report_s": drawn - simulated,
            "report_bytes": page_bytes,
            "gap": gap(plan),
            "iteration_s": plan.predicted.iteration_s,
            "no_offload_s": plan.predicted.no_offload_s,
            "model_bytes": model_bytes(profile),
        }
        cases.append(case)
        seconds = f"{format_seconds(case['plan_s'])} ({format_seconds(case['plan_cpu_s'])} of the processor)"
        print(f"{layers:3d} layers: planned in {seconds}, gap {shown(case['gap'])}, {len(plan.ops)} ops", flush=True)
    what = {
        "config": options.config,
        "hardware": options.hardware,
        "memory_bytes": parse_bytes(options.memory),
        "host_memory_bytes": parse_bytes(options.host_memory),
        **shape,
    }
    print(save("bench-planner", "bench-planner", what, {"cases": cases}, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
