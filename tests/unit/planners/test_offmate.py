"""The OFFMATE program: published numbers, properties, and solutions replayed with the paper's rules, written again."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pulp
import pytest

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.planners.baselines import no_offload_s
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.offmate.program import RelaxedPrograms, lower_bound, smallest_budget
from lt_offload.schema.profile import Profile
from scripts.papers.offmate_program import PAPER, PaperProgram, solve_offmate
from tests import sampling
from tests.support.profiles.fixtures import GB, llama7b_b4, with_bandwidth
from tests.support.profiles.program_rules import host_bytes, peak_bytes, random_profile, violations
from tests.unit.plan.test_planner_bounds import rich_profile

SEEDS = range(10)


def paper(gigabytes: float | None, **kwargs: Any) -> OffmateConfig:
    settings: dict[str, Any] = {"host_budget_bytes": int(128 * GB), "traffic_weight": 0.0, **PAPER, **kwargs}
    return OffmateConfig(budget_bytes=None if gigabytes is None else int(gigabytes * GB), **settings)


# Numbers of an independent implementation, times in seconds: relaxation, best whole options.


@pytest.mark.parametrize(
    ("layers", "gigabytes", "relaxed", "whole"),
    [
        (4, 6, 2.4360, 2.4360),
        (4, 7, 1.9857, 1.9857),
        (4, 8, 1.7819, 1.7851),
        (4, 10, 1.6743, 1.6759),
        (4, 40, 1.6675, 1.6675),
        (8, 6, 4.3242, 4.3242),
        (8, 7, 3.6303, 3.6303),
        (8, 8, 3.2473, 3.2499),
        (8, 10, 3.0820, 3.0860),
        (8, 40, 3.0523, 3.0523),
    ],
)
def test_small_models(layers: int, gigabytes: float, relaxed: float, whole: float) -> None:
    profile, config = llama7b_b4(layers), paper(gigabytes)
    solution = solve_offmate(profile, config, PaperProgram)
    assert solution.bound_s == pytest.approx(relaxed, abs=1.5e-4)
    assert solution.iteration_s == pytest.approx(whole, abs=1.5e-4)
    assert violations(profile, config, solution, PaperProgram) == []


@pytest.mark.parametrize(
    ("switch", "seconds", "ram"),
    [({}, 11.61, 98.2), ({"host_update": False}, 12.90, 90.6), ({"activation_offload": False}, 14.12, 92.4)],
    ids=["full", "no host update", "no activation offload"],
)
def test_table_2_of_the_paper(switch: dict[str, bool], seconds: float, ram: float) -> None:
    profile, config = llama7b_b4(), paper(10, traffic_weight=1e-4, **switch)
    solution = solve_offmate(profile, config, PaperProgram)
    assert solution.iteration_s == pytest.approx(seconds, abs=0.006)
    assert solution.iteration_s / solution.bound_s < 1.01
    assert host_bytes(profile, solution, PaperProgram) / GB == pytest.approx(ram, rel=0.01)
    assert violations(profile, config, solution, PaperProgram) == []


# Every solution obeys the rules.


@pytest.mark.parametrize(
    ("seed", "model"), sampling.grid(SEEDS, ["plain", "tied", "half", "lora", "frozen start"], count=25)
)
def test_random_models_obey_the_rules(seed: int, model: str) -> None:
    rng = np.random.default_rng([seed, len(model)])
    profile = random_profile(rng, model)
    least = smallest_budget(profile, OffmateConfig(budget_bytes=None))
    config = OffmateConfig(
        budget_bytes=int(least * rng.choice([1.0, 1.02, 1.3, 3.0])),
        phi=float(rng.choice([0.0, 0.25, 1.0])),
        lag=int(rng.integers(0, 3)),
        lookahead=int(rng.integers(0, 3)),
        reach=int(rng.integers(2, 9)),
        gradient_reach=int(rng.integers(1, 4)),
        host_update=bool(rng.random() < 0.8),
    )
    program = PaperProgram if rng.random() < 0.5 else LinearProgram
    config = replace(config, budget_bytes=max(config.budget_bytes or 0, smallest_budget(profile, config, program)))
    solution = solve_offmate(profile, config, program)
    assert violations(profile, config, solution, program) == []
    assert solution.bound_s <= solution.iteration_s <= solution.bound_s * 1.2


@pytest.mark.parametrize("model", ["plain", "tied", "lora"])
def test_the_smallest_budget_is_used_up(model: str) -> None:
    for seed in sampling.some(SEEDS, 4):
        profile = random_profile(np.random.default_rng(seed), model)
        config = OffmateConfig(budget_bytes=None)
        config = replace(config, budget_bytes=smallest_budget(profile, config))
        solution = solve_offmate(profile, config)
        assert peak_bytes(profile, config, solution) >= 0.9999 * (config.budget_bytes or 0), seed


# Properties.


def bounds(profile: Profile, configs: list[OffmateConfig]) -> list[float]:
    return [lower_bound(profile, config, PaperProgram) for config in configs]


def non_increasing(values: list[float]) -> bool:
    return all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(values))


def test_more_of_anything_never_hurts() -> None:
    profile = llama7b_b4(6)
    assert non_increasing(bounds(profile, [paper(m) for m in (5.5, 6, 7, 8, 9, 10, 12, 16, 40)]))
    assert non_increasing(bounds(profile, [paper(7, host_budget_bytes=int(h * GB)) for h in (18.3, 18.5, 19, 20, 30)]))
    assert non_increasing(bounds(profile, [paper(7, reach=k) for k in (2, 3, 4, 6, 14)]))
    assert non_increasing(bounds(profile, [paper(7, gradient_reach=k) for k in (1, 2, 3, 6)]))
    assert non_increasing([lower_bound(with_bandwidth(profile, b), paper(8), PaperProgram) for b in (2, 4, 8, 16, 64)])
    speeds = [
        replace(profile, optimizer=replace(profile.optimizer, host_bytes_per_s=s * GB)) for s in (0.1, 0.5, 1, 2, 9)
    ]
    assert non_increasing([lower_bound(faster, paper(8), PaperProgram) for faster in speeds])


def test_bound_and_solution_enclose_the_best_whole_options() -> None:
    profile = llama7b_b4(3)
    for budget, switches in ((6, {}), (7, {}), (8, {"host_update": False})):
        best = np.inf
        for names in itertools.product(("keep", "recompute", "offload"), repeat=3):
            fixed = [replace(b, options=(b.option(n),)) for b, n in zip(profile.blocks[1:-1], names, strict=True)]
            whole = replace(profile, blocks=(profile.blocks[0], *fixed, profile.blocks[-1]))
            try:
                best = min(best, lower_bound(whole, paper(budget, **switches), PaperProgram))
            except InfeasibleError:
                continue
        solution = solve_offmate(profile, paper(budget, **switches), PaperProgram)
        assert solution.bound_s <= best * (1 + 1e-6)
        assert best <= solution.iteration_s * (1 + 1e-6) <= solution.bound_s * 1.0101


def test_branching_helps_where_rounding_is_not_good_enough() -> None:
    profile = llama7b_b4(4)
    config = paper(8.5)
    rounded = solve_offmate(profile, replace(config, gap=1.0), PaperProgram)
    branched = solve_offmate(profile, replace(config, gap=1e-6), PaperProgram)
    assert branched.bound_s == pytest.approx(rounded.bound_s, rel=1e-6)
    assert branched.iteration_s < rounded.iteration_s - 1e-4
    assert violations(profile, config, branched, PaperProgram) == []


def test_unlimited_memory_leaves_computation_and_update() -> None:
    profile = llama7b_b4(4)
    free = replace(profile, blocks=tuple(replace(block, launch_s=0.0) for block in profile.blocks))
    solution = solve_offmate(free, OffmateConfig(budget_bytes=None, host_update=False))
    assert solution.iteration_s == pytest.approx(no_offload_s(free), rel=1e-6)
    assert set(solution.options) == {"keep"}
    assert sum(flows.prefetch.sum() + flows.state_prefetch.sum() for flows in solution.flows) == 0
    with_host = solve_offmate(free, OffmateConfig(budget_bytes=None))
    assert no_offload_s(free) - 0.2 < with_host.iteration_s < no_offload_s(free) - 0.01


@pytest.mark.parametrize(("seed", "share", "slower"), [(26, 0.45, 4), (15, 0.8, 4), (1, 0.6, 1)])
@pytest.mark.parametrize("reach", [3, 6])
def test_what_bounds_count_of_all_groups_together_raises_none(
    seed: int, share: float, slower: float, reach: int
) -> None:
    """With nothing between the steps that are near, the first two bounds would be 0.4 and 0.01 % too high."""
    profile = rich_profile(seed)
    optimizer = replace(profile.optimizer, host_bytes_per_s=profile.optimizer.host_bytes_per_s / slower)
    profile = replace(profile, optimizer=optimizer)
    everything = sum(2 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    config = OffmateConfig(budget_bytes=int(share * everything), phi=0.0, lag=0, lookahead=0, optimistic=True)
    exact = lower_bound(profile, config)
    together = lower_bound(profile, replace(config, update_reach=reach))
    assert exact * (1 - 1e-3) <= together <= exact * (1 + 1e-6)


# Tied and frozen parameters, optimizers without states.


# What does not fit.


def test_the_smallest_budget_is_the_least_that_works() -> None:
    profile, config = llama7b_b4(4), paper(4)
    with pytest.raises(InfeasibleError):
        solve_offmate(profile, config, PaperProgram)
    needed = smallest_budget(profile, config, PaperProgram)
    assert solve_offmate(profile, replace(config, budget_bytes=needed), PaperProgram).iteration_s > 0
    with pytest.raises(InfeasibleError):
        lower_bound(profile, replace(config, budget_bytes=int(needed * 0.995)), PaperProgram)


def test_host_budget_below_the_parameters() -> None:
    profile, config = llama7b_b4(4), paper(None, host_budget_bytes=int(3 * GB))
    with pytest.raises(InfeasibleError, match="host memory is too small with any device memory"):
        smallest_budget(profile, config, PaperProgram)


def test_a_time_limit_that_is_too_short_is_named() -> None:
    with pytest.raises(ConfigError, match=r"solver_time_limit=0\.01 is too short"):
        solve_offmate(llama7b_b4(16), paper(8, time_limit=0.01), PaperProgram)


# Solvers.


def test_another_solver_finds_the_same_bound() -> None:
    profile = llama7b_b4(4)
    cbc = pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, mip=False)
    for budget in (7, 8):
        program = PaperProgram(profile, paper(budget))
        program.problem.solve(cbc)
        seconds = pulp.value(program.problem.objective) * program.seconds_unit
        assert lower_bound(profile, paper(budget), PaperProgram) == pytest.approx(seconds, rel=1e-5)
    too_small = PaperProgram(profile, paper(4)).problem
    too_small.solve(cbc)
    assert too_small.status == pulp.LpStatusInfeasible


def test_planning_needs_no_torch() -> None:
    code = "import sys, lt_offload.plan.planners.offmate.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_host_may_update_the_embedding_while_its_forward_waits() -> None:
    """Without that, its optimizer states must fit on the device, whatever the budget."""
    profile = llama7b_b4(layers=4)
    config = OffmateConfig(budget_bytes=None)

    class WithoutWaits(LinearProgram):
        late_update = False

    states = profile.tensors[0].state_bytes
    least = smallest_budget(profile, config, WithoutWaits)
    assert smallest_budget(profile, config) < least
    budget = least - states // 4
    solution = solve_offmate(profile, replace(config, budget_bytes=budget))
    embedding = solution.flows[0]
    assert embedding.host_share > 0.1
    assert embedding.host_update[1] == pytest.approx(embedding.host_share)
    assert violations(profile, replace(config, budget_bytes=budget), solution) == []


def test_a_program_that_goes_on_from_another_budget_ends_where_a_new_one_does() -> None:
    profile = llama7b_b4(8)
    config = OffmateConfig(budget_bytes=int(6e9), host_budget_bytes=int(128e9), lag=0, lookahead=0)
    series = RelaxedPrograms(profile, config)
    for budget, ram in ((6e9, 128e9), (8e9, 128e9), (7e9, 64e9), (6e9, 128e9)):
        again = series.solution(int(budget), int(ram), 60.0)
        alone = RelaxedPrograms(profile, config).solution(int(budget), int(ram), 60.0)
        assert again.iteration_s == pytest.approx(alone.iteration_s, rel=1e-6)
    with pytest.raises(InfeasibleError):
        series.solution(int(2e9), int(128e9), 60.0)
    assert series.solution(int(6e9), int(128e9), 60.0).iteration_s > 0
    with pytest.raises(ConfigError, match="too short"):
        series.solution(int(8e9), int(128e9), 0.0)


ALL_WAYS_TO_SOLVE = """
import pulp
from lt_offload.plan.planners import lp

problem = lp.Problem("x")
variable = problem.add_variable("x", 0, 1.5, cat=pulp.LpInteger)
problem.setObjective(-1 * variable)
ways = {}, {"method": "value"}, {"method": "again"}, {"gap": 0.1}
found = [(lp.run(problem, time_limit=60, **way), variable.value()) for way in ways]
assert found == [("solved", 1.5)] * 3 + [("solved", 1.0)], found
"""


def test_nothing_is_printed_while_programs_are_solved() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_WAYS_TO_SOLVE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
