"""How long planning takes, and how good the plans are: Llama-2-7B with more or fewer layers, from its configuration.

Beside it what else people wait for: the import, a simulation (goal for 40 layers: 0.1 s), a report (80 layers: 2 s).

python -m scripts.bench.planner [--layers 32 40 80] [--hardware rtx-3060-12gb] [--memory 11GB]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import lt_offload
from lt_offload.profiling.from_config import load_model_config
from lt_offload.report.page import write_plan_report
from lt_offload.units import format_seconds, parse_bytes
from scripts.common import arguments, save
from scripts.planning import model_bytes

GOALS = {40: 10.0, 80: 30.0}
"""Seconds, on two cores."""


IMPORT_GOAL = 0.1
_IMPORT = "import time; began = time.perf_counter(); import lt_offload; print(time.perf_counter() - began)"


def import_seconds() -> float:
    """Return how long ``import lt_offload`` takes in a new process, the best of five."""
    command = [sys.executable, "-c", _IMPORT]
    return min(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(5))


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
    options = parser.parse_args()
    shape = {"batch_size": options.batch_size, "sequence_length": options.sequence_length}
    cases = []
    for layers in options.layers:
        config = load_model_config(options.config)
        config.num_hidden_layers = layers
        began = time.perf_counter()
        profile = lt_offload.profile_config(config, dtype="bfloat16", hardware=options.hardware, **shape)
        profiled = time.perf_counter()
        plan = lt_offload.solve(profile, memory=options.memory, host_memory=options.host_memory)
        done = time.perf_counter()
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
            "plan_s": done - profiled,
            "goal_s": GOALS.get(layers),
            "planner": plan.planner,
            "simulate_s": simulated - done,
            "report_s": drawn - simulated,
            "report_bytes": page_bytes,
            "gap": plan.predicted.gap,
            "iteration_s": plan.predicted.iteration_s,
            "no_offload_s": plan.predicted.no_offload_s,
            "model_bytes": model_bytes(profile),
        }
        cases.append(case)
        seconds = format_seconds(case["plan_s"])
        print(f"{layers:3d} layers: planned in {seconds}, gap {case['gap']:.2%}, {len(plan.ops)} ops", flush=True)
    what = {
        "config": options.config,
        "hardware": options.hardware,
        "memory_bytes": parse_bytes(options.memory),
        "host_memory_bytes": parse_bytes(options.host_memory),
        **shape,
    }
    figures = {"cases": cases, "import_s": import_seconds(), "import_goal_s": IMPORT_GOAL}
    print(f"import lt_offload: {format_seconds(figures['import_s'])}")
    print(save("bench-planner", "bench-planner", what, figures, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
