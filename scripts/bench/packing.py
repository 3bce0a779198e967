"""How well plans fill the memory for weights and optimizer states: every planner, several models and budgets.

The waste is by how much the arena is larger than the peak of live bytes of the plan as it is issued; no arena can be
smaller than that. The use is the peak of live bytes as part of the room: what the budget leaves beside the most that
activations, gradients and workspaces take. Where a plan needs less than there is, the use is low without any waste.

python -m scripts.bench.packing [--tiny] [--planners greedy l2l ...]
"""

from __future__ import annotations

import time
from typing import Any

import lt_offload
from lt_offload import Plan, Profile
from lt_offload.errors import InfeasibleError, UnsupportedError
from lt_offload.plan.iteration.memory import framework_bytes, room_within, usage
from lt_offload.plan.settings import PLANNERS
from scripts.common import arguments, save
from scripts.planning import gap, shown

HARDWARE = "rtx-3060-12gb"
HOST_MEMORY = "256GB"
CASES = (
    ("llama2-7b", "float32", 4, 512, ("10GB", "12GB", "24GB")),
    ("llama2-7b", "bfloat16", 4, 512, ("8GB", "12GB", "16GB", "24GB")),
    ("bloom-3b", "bfloat16", 4, 512, ("8GB", "12GB")),
    ("phi3-mini", "bfloat16", 4, 512, ("8GB", "12GB")),
    ("mistral-7b", "bfloat16", 4, 512, ("12GB", "16GB")),
    ("llama3-8b", "bfloat16", 4, 512, ("12GB", "24GB")),
    ("tinyllama-1.1b", "bfloat16", 4, 512, ("4GB", "6GB", "16GB")),
    ("smollm2-135m", "float32", 2, 256, ("1GB", "1.5GB", "4GB")),
)
"""Model, dtype, batch size, sequence length, budgets."""
TINY = (("smollm2-135m", "float32", 1, 64, ("1.2GB", "4GB")),)


def main() -> int:
    """Plan, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="one small model")
    options = parser.parse_args()
    rows = []
    for config, dtype, batch_size, sequence_length, budgets in TINY if options.tiny else CASES:
        shape = {"batch_size": batch_size, "sequence_length": sequence_length, "dtype": dtype}
        profile = lt_offload.profile_config(config, hardware=HARDWARE, **shape)
        for memory in budgets:
            for planner in options.planners:
                row = {
                    "model": config,
                    "memory": memory,
                    "planner": planner,
                    **shape,
                    **measured(profile, memory, planner),
                }
                rows.append(row)
                print(line(row), flush=True)
    what = {"hardware": HARDWARE, "host_memory": HOST_MEMORY, "planners": options.planners, "tiny": options.tiny}
    print(save("bench-packing", "bench-packing", what, {"cases": rows}, options.results))
    return 0


def measured(profile: Profile, memory: str, planner: str) -> dict[str, Any]:
    """Return what ``planner`` makes of the budget, or why it has no plan."""
    began = time.perf_counter()
    try:
        plan = lt_offload.solve(profile, memory=memory, host_memory=HOST_MEMORY, planner=planner)
    except (InfeasibleError, UnsupportedError) as error:
        return {"reason": str(error)}
    return {"seconds": time.perf_counter() - began, **filled(plan, profile)}


def filled(plan: Plan, profile: Profile) -> dict[str, Any]:
    """Return the figures of ``plan``."""
    packing = plan.packing
    assert packing is not None, "built plans say how large their weights are"
    room = room_within(plan.budget_bytes, profile) - int(framework_bytes(usage(plan), profile).max())
    return {
        "extent_bytes": packing.extent,
        "live_peak_bytes": packing.live_peak,
        "room_bytes": room,
        "waste": packing.waste,
        "used": packing.live_peak / room if room else 1.0,
        "tensors": packing.tensors,
        "transfers": packing.transfers,
        "gap": gap(plan),
    }


def line(row: dict[str, Any]) -> str:
    """Return one line about a case."""
    name = f"{row['model']} {row['dtype']} {row['memory']}, {row['planner']}:"
    if "reason" in row:
        return f"{name} {row['reason'].partition(':')[0]}"
    return (
        f"{name} waste {row['waste']:.2%}, {row['used']:.1%} of the room in use, {row['tensors']} copies in "
        f"{row['transfers']} transfers, gap {shown(row['gap'])}, {row['seconds']:.1f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
