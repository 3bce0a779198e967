"""How much of the gap between a plan and its bound is the plan's and how much the bound's, where memory is short.

Random models of a few blocks get 1.2 times the device memory with which the planner says that they fit at all. Two
parts of a gap can be proved. A plan that a search of about ten times as long finds shows what the plan loses. The
bound's program may divide everything; with whole options of blocks, and whole tensors that the host updates, it is
still one of every plan, and shows what the bound loses. Between both is what nobody knows here.

Beside them, without a proof, is what the planner's own program finds in fractions: it counts memory as schedules take
it, step by step. What it is above the bound is a guess at what cannot be reached, as a plan may be faster.

python -m scripts.simulated.near_floor [--models 8] [--share 1.2]
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from lt_offload.errors import InfeasibleError
from lt_offload.plan import solve
from lt_offload.plan.planners.lp import require, run
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import Program
from lt_offload.plan.planners.offmate.program import lower_bound, solve_offmate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.common import arguments, save
from scripts.planning import NO_LIMIT_S, best_plan, floor_bytes
from tests.support.profiles.program_rules import random_profile

NAME = "bench-near-floor"
KINDS = ("plain", "tied", "half", "lora", "frozen start")
BRANCHING_S = 60.0
GAP = 1e-3
"""Where branching may stop; what it has proved until then counts."""

Result = dict[str, Any]


def case(seed: int, share: float) -> Result:
    """Plan for the random model ``seed`` in ``share`` of its smallest budget, and take the gap apart; seconds."""
    kind = KINDS[seed % len(KINDS)]
    profile = random_profile(np.random.default_rng(seed), kind)
    memory = int(share * floor_bytes(profile))
    plan = solve(profile, memory=memory, time_limit=NO_LIMIT_S)
    finer = best_plan(profile, memory=memory)
    bound = bound_config(plan, profile)
    counted = OffmateConfig(
        budget_bytes=plan.budget_bytes, host_budget_bytes=plan.host_budget_bytes, time_limit=NO_LIMIT_S
    )
    found: Result = {
        "name": f"{seed}, {kind}",
        "blocks": len(profile.blocks),
        "budget_bytes": plan.budget_bytes,
        "planner": plan.planner,
        "plan_s": plan.predicted.iteration_s,
        "finer_s": min(finer.predicted.iteration_s, plan.predicted.iteration_s),
        "bound_s": lower_bound(profile, bound),
        "program_s": None,
    }
    found["whole_s"] = max(whole_bound(profile, bound), found["bound_s"])
    with suppress(InfeasibleError):
        found["program_s"] = solve_offmate(profile, counted).bound_s
    return found


def bound_config(plan: Plan, profile: Profile) -> OffmateConfig:
    """Return how the bound's program is set up, with copies at any time."""
    return OffmateConfig(
        budget_bytes=plan.budget_bytes,
        host_budget_bytes=plan.host_budget_bytes,
        phi=0.0,
        lag=0,
        lookahead=0,
        optimistic=True,
        reach=2 * len(profile.blocks),
        traffic_weight=0.0,
        time_limit=NO_LIMIT_S,
    )


def whole_bound(profile: Profile, config: OffmateConfig) -> float:
    """Return the seconds that no plan with whole options and whole tensors on the host can beat, as far as proved."""
    program = Program(profile, config)
    for number, terms in enumerate(program.terms):
        if isinstance(terms.host_share, float):
            continue
        group = terms.group
        parts = [
            (
                profile.tensors[index].bytes / group.trainable_bytes,
                program.problem.add_variable(f"whole_{number:03d}_{index:03d}", 0, 1, cat="Integer"),
            )
            for index in group.tensors
            if profile.tensors[index].trainable
        ]
        require(program.problem, [*parts, (-1, terms.host_share)], "==")
    run(program.problem, time_limit=BRANCHING_S, gap=GAP)
    proved = float(program.problem.solverModel.getInfo().mip_dual_bound)
    return proved * program.seconds_unit if math.isfinite(proved) else 0.0


def main() -> None:
    """Plan, prove, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--models", type=int, default=8, help="random models")
    parser.add_argument("--share", type=float, default=1.2, help="device memory over the least with which one fits")
    options = parser.parse_args()
    cases = []
    for seed in range(options.models):
        cases.append(case(seed, options.share))
        print(cases[-1], flush=True)
    settings = {"models": options.models, "share": options.share}
    print(save(NAME, NAME, settings, {"cases": cases}, options.results))


if __name__ == "__main__":
    main()
