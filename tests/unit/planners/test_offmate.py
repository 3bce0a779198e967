"""The OFFMATE program: published numbers, properties, and solutions replayed with the paper's rules, written again."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import highspy
import numpy as np
import pulp
import pytest

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.planners.baselines import no_offload_s
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.model import Program
from lt_offload.plan.planners.offmate.program import (
    RelaxedPrograms,
    lower_bound,
    smallest_budget,
    smallest_host_budget,
    solve_offmate,
)
from lt_offload.plan.planners.offmate.solution import Group, groups
from lt_offload.schema.profile import Profile
from scripts.papers.offmate import PAPER, PaperProgram
from tests import sampling
from tests.support.profiles.fixtures import GB, llama7b_b4, llama7b_b8_3090, with_bandwidth
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


@pytest.mark.parametrize(("layers", "expected"), [(4, 1.7212), (8, 3.1728)])
def test_no_offload(layers: int, expected: float) -> None:
    assert no_offload_s(llama7b_b4(layers)) == pytest.approx(expected, abs=1e-4)


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


def test_the_faster_card_without_activation_offload() -> None:
    config = paper(22, host_budget_bytes=int(256 * GB), activation_offload=False)
    assert solve_offmate(llama7b_b8_3090(), config, PaperProgram).iteration_s == pytest.approx(10.07, rel=0.005)


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
        pools=rng.choice(["shared", "split"]),
        phi=float(rng.choice([0.0, 0.25, 1.0])),
        lag=int(rng.integers(0, 3)),
        lookahead=int(rng.integers(0, 3)),
        reach=int(rng.integers(2, 9)),
        gradient_reach=int(rng.integers(1, 4)),
        host_update=bool(rng.random() < 0.8),
    )
    program = PaperProgram if rng.random() < 0.5 else Program
    config = replace(config, budget_bytes=max(config.budget_bytes or 0, smallest_budget(profile, config, program)))
    solution = solve_offmate(profile, config, program)
    assert violations(profile, config, solution, program) == []
    assert solution.bound_s <= solution.iteration_s <= solution.bound_s * 1.2


@pytest.mark.parametrize("model", ["plain", "tied", "lora"])
def test_the_smallest_budget_is_used_up(model: str) -> None:
    for seed in sampling.some(SEEDS, 4):
        profile = random_profile(np.random.default_rng(seed), model)
        config = OffmateConfig(budget_bytes=None, pools="shared")
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


def test_a_switch_that_is_on_never_hurts() -> None:
    profile = llama7b_b4(6)
    for budget in (8, 10):
        full = lower_bound(profile, paper(budget), PaperProgram)
        for switch in ("host_update", "activation_offload", "recompute"):
            assert full <= lower_bound(profile, paper(budget, **{switch: False}), PaperProgram) * (1 + 1e-6), (
                budget,
                switch,
            )


def test_an_added_option_never_hurts() -> None:
    profile = llama7b_b4(6)
    gains = []
    for budget, added in itertools.product((8, 10), ("keep", "recompute", "offload")):
        fewer = replace(
            profile,
            blocks=tuple(
                replace(block, options=tuple(o for o in block.options if o.name != added) or block.options)
                for block in profile.blocks
            ),
        )
        gains.append(
            lower_bound(fewer, paper(budget), PaperProgram) / lower_bound(profile, paper(budget), PaperProgram)
        )
    assert min(gains) >= 1 - 1e-6
    assert max(gains) > 1.05


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
    assert solution.budget_bytes == peak_bytes(free, OffmateConfig(budget_bytes=None), solution)
    with_host = solve_offmate(free, OffmateConfig(budget_bytes=None))
    assert no_offload_s(free) - 0.2 < with_host.iteration_s < no_offload_s(free) - 0.01


@pytest.mark.parametrize("budget", [6, 8, 10])
def test_windows_cost_nothing_that_matters(budget: int) -> None:
    profile = llama7b_b4(8)
    dense = lower_bound(profile, paper(budget, reach=20, gradient_reach=20), PaperProgram)
    assert dense <= lower_bound(profile, paper(budget), PaperProgram) * (1 + 1e-6)
    assert lower_bound(profile, paper(budget), PaperProgram) <= dense * 1.001


@pytest.mark.parametrize(("seed", "share", "slower"), [(26, 0.45, 4), (15, 0.8, 4), (1, 0.45, 1)])
@pytest.mark.parametrize("reach", [3, 6])
def test_what_bounds_count_of_all_groups_together_raises_none(
    seed: int, share: float, slower: float, reach: int
) -> None:
    """With nothing between the steps that are near, the first two bounds would be 0.4 and 0.01 % too high."""
    profile = rich_profile(seed)
    optimizer = replace(profile.optimizer, host_bytes_per_s=profile.optimizer.host_bytes_per_s / slower)
    profile = replace(profile, optimizer=optimizer)
    everything = sum(2 * tensor.bytes + tensor.state_bytes for tensor in profile.tensors)
    config = OffmateConfig(
        budget_bytes=int(share * everything), pools="shared", phi=0.0, lag=0, lookahead=0, optimistic=True
    )
    exact = lower_bound(profile, config)
    together = lower_bound(profile, replace(config, update_reach=reach))
    assert exact * (1 - 1e-3) <= together <= exact * (1 + 1e-6)


def test_the_tie_break_changes_traffic_and_not_the_bound() -> None:
    profile = llama7b_b4(4)
    exact = lower_bound(profile, paper(8), PaperProgram)
    for weight in (1e-4, 1e-2):
        assert (
            exact * (1 - 2 * weight)
            <= lower_bound(profile, paper(8, traffic_weight=weight), PaperProgram)
            <= exact * (1 + 1e-6)
        )
    moved = [
        sum(float(f.prefetch.sum()) for f in solve_offmate(profile, paper(40, traffic_weight=w), PaperProgram).flows)
        for w in (0, 1e-4)
    ]
    assert moved[1] <= moved[0]


def test_split_pools_need_as_much_or_more() -> None:
    profile = llama7b_b4(6)
    assert smallest_budget(profile, paper(None, pools="split"), PaperProgram) > smallest_budget(
        profile, paper(None), PaperProgram
    )
    for budget in (7, 8, 10):
        assert lower_bound(profile, paper(budget), PaperProgram) <= lower_bound(
            profile, paper(budget, pools="split"), PaperProgram
        ) * (1 + 1e-6)


def restricted(profile: Profile, name: str, **changes: Any) -> Profile:
    """``profile`` with the one option ``name``, changed, wherever it is offered."""
    blocks = [
        replace(block, options=tuple(replace(o, **changes) for o in block.options if o.name == name) or block.options)
        for block in profile.blocks
    ]
    return replace(profile, blocks=tuple(blocks))


def test_early_fetches_take_memory_and_save_time() -> None:
    profile = restricted(llama7b_b4(6, trainable=False), "offload")
    fetched = profile.blocks[1].option("offload").offload_bytes
    within = smallest_budget(profile, paper(None), PaperProgram)
    assert smallest_budget(profile, paper(None, lookahead=1), PaperProgram) == pytest.approx(
        within + fetched, abs=0.02 * GB
    )
    slow = with_bandwidth(profile, 1.2)
    late, early = (lower_bound(slow, paper(40, host_update=False, lookahead=n, lag=n), PaperProgram) for n in (0, 1))
    assert early < late - 0.1


def test_inputs_that_leave_take_no_memory() -> None:
    profile = llama7b_b4(24, trainable=False)
    intervals, leaves = (restricted(profile, "recompute", keeps_input=keeps) for keeps in (True, False))
    saved = smallest_budget(intervals, paper(None), PaperProgram) - smallest_budget(leaves, paper(None), PaperProgram)
    assert saved == pytest.approx(23 * profile.blocks[1].input_bytes, rel=0.1)


def test_context_and_shared_bytes_count_always() -> None:
    profile = llama7b_b4(4)
    more = replace(profile, shared_bytes=int(0.4 * GB), hardware=replace(profile.hardware, context_bytes=int(0.6 * GB)))
    assert lower_bound(more, paper(8), PaperProgram) == pytest.approx(
        lower_bound(profile, paper(7), PaperProgram), rel=1e-6
    )
    assert smallest_budget(more, paper(None), PaperProgram) == pytest.approx(
        smallest_budget(profile, paper(None), PaperProgram) + GB, rel=1e-4
    )


def test_units_do_not_matter() -> None:
    """A model a million times smaller on a machine a thousand times slower takes a thousandth of the time."""
    profile = llama7b_b4(4)
    small = shrink(profile, 1e-6, 1e-3)
    large, little = (
        lower_bound(profile, paper(7), PaperProgram),
        lower_bound(small, paper(7e-6, host_budget_bytes=128_000), PaperProgram),
    )
    assert little == pytest.approx(large * 1e-3, rel=1e-3)


def shrink(profile: Profile, size: float, time: float) -> Profile:
    def sizes(obj: Any, *names: str) -> dict[str, int]:
        return {name: round(getattr(obj, name) * size) for name in names}

    option_sizes = ("saved_bytes", "offload_bytes", "forward_peak_bytes", "backward_peak_bytes")
    speed = size / time
    return replace(
        profile,
        tensors=tuple(replace(t, **sizes(t, "bytes", "state_bytes")) for t in profile.tensors),
        blocks=tuple(
            replace(
                block,
                launch_s=block.launch_s * time,
                **sizes(block, "input_bytes", "output_bytes"),
                options=tuple(
                    replace(o, forward_s=o.forward_s * time, backward_s=o.backward_s * time, **sizes(o, *option_sizes))
                    for o in block.options
                ),
            )
            for block in profile.blocks
        ),
        optimizer=replace(
            profile.optimizer,
            host_bytes_per_s=profile.optimizer.host_bytes_per_s * speed,
            device_bytes_per_s=profile.optimizer.device_bytes_per_s * speed,
        ),
        hardware=replace(
            profile.hardware,
            h2d_bytes_per_s=profile.hardware.h2d_bytes_per_s * speed,
            d2h_bytes_per_s=profile.hardware.d2h_bytes_per_s * speed,
        ),
    )


# Tied and frozen parameters, optimizers without states.


def test_tied_parameters_are_there_for_every_use_and_updated_once() -> None:
    profile = llama7b_b4(8, tied=True)
    config = paper(6.5)
    solution = solve_offmate(profile, config, PaperProgram)
    tied = next(i for i, group in enumerate(solution.groups) if group.blocks == (0, 9))
    flows = solution.flows[tied]
    # 20 steps; the last backward is step 19, the forwards are steps 0 and 9, the first backward is step 10.
    assert [tau for tau in (0, 1, 10, 11) if flows.resident[tau] != 1] == []
    assert flows.host_share == 0
    assert violations(profile, config, solution, PaperProgram) == []
    assert no_offload_s(profile) == pytest.approx(no_offload_s(llama7b_b4(8)) - 32000 * 4096 * 4 / 16.6e9, rel=1e-6)


def test_tied_parameters_leave_between_their_uses_when_memory_is_short() -> None:
    profile = llama7b_b4(8, tied=True)
    config = paper(None)
    config = replace(config, budget_bytes=smallest_budget(profile, config, PaperProgram))
    solution = solve_offmate(profile, config, PaperProgram)
    tied = next(flows for group, flows in zip(solution.groups, solution.flows, strict=True) if len(group.blocks) == 2)
    assert tied.resident[2:10].min() < 0.5
    assert tied.prefetch[2:10].sum() > 0.5
    assert violations(profile, config, solution, PaperProgram) == []


def test_frozen_parameters_are_never_written_back() -> None:
    profile = random_profile(np.random.default_rng(0), "lora")
    config = OffmateConfig(budget_bytes=None)
    config = replace(config, budget_bytes=smallest_budget(profile, config))
    solution = solve_offmate(profile, config)
    frozen = [flows for group, flows in zip(solution.groups, solution.flows, strict=True) if group.trainable_bytes == 0]
    assert len(frozen) >= 1
    for flows in frozen:
        moved = flows.write_back.sum() + flows.grad_offload.sum() + flows.host_update.sum() + flows.state_resident.sum()
        assert moved == flows.host_share == 0
    assert sum(flows.prefetch.sum() for flows in frozen) > 0
    for group, flows in zip(solution.groups, solution.flows, strict=True):
        assert flows.write_back.sum() * group.bytes <= group.trainable_bytes * (1 + 1e-6)


@pytest.mark.parametrize("states", [0, 1])
def test_optimizers_with_fewer_states_need_less(states: int) -> None:
    adam, other = llama7b_b4(4), llama7b_b4(4, states=states)
    config = paper(7)
    assert lower_bound(other, config, PaperProgram) <= lower_bound(adam, config, PaperProgram) * (1 + 1e-6)
    solution = solve_offmate(other, config, PaperProgram)
    assert violations(other, config, solution, PaperProgram) == []
    if not states:
        assert sum(flows.state_prefetch.sum() + flows.state_resident.sum() for flows in solution.flows) == 0


def test_groups_know_their_steps() -> None:
    tied = groups(llama7b_b4(2, tied=True))
    assert [(group.blocks, group.first_forward, group.last_backward) for group in tied] == [
        ((0, 3), 0, 7),
        ((1,), 1, 6),
        ((2,), 2, 5),
        ((3,), 3, 4),
    ]
    assert isinstance(tied[0], Group)


# What does not fit.


def test_infeasible_device_budget_names_one_that_works() -> None:
    profile, config = llama7b_b4(4), paper(4)
    with pytest.raises(InfeasibleError, match=r"llama7b-4.*memory=4 GB.*smallest that fits: memory=\d+MB") as caught:
        solve_offmate(profile, config, PaperProgram)
    needed = caught.value.needed_bytes
    assert needed == smallest_budget(profile, config, PaperProgram)
    assert solve_offmate(profile, replace(config, budget_bytes=needed), PaperProgram).iteration_s > 0
    with pytest.raises(InfeasibleError):
        lower_bound(profile, replace(config, budget_bytes=int(needed * 0.995)), PaperProgram)


def test_infeasible_host_budget_names_both_ways_out() -> None:
    profile, config = llama7b_b4(4), paper(5, host_budget_bytes=int(10 * GB))
    least = smallest_host_budget(profile, config, PaperProgram)
    with pytest.raises(InfeasibleError, match=r"memory=\d+MB with this host memory or host_memory=\d+MB") as caught:
        solve_offmate(profile, config, PaperProgram)
    assert solve_offmate(profile, replace(config, budget_bytes=caught.value.needed_bytes), PaperProgram).iteration_s > 0
    assert solve_offmate(profile, replace(config, host_budget_bytes=least), PaperProgram).iteration_s > 0


def test_host_budget_below_the_parameters() -> None:
    profile, config = llama7b_b4(4), paper(None, host_budget_bytes=int(3 * GB))
    with pytest.raises(InfeasibleError, match=r"host copy of its parameters alone takes 4287MB"):
        smallest_budget(profile, config, PaperProgram)
    with pytest.raises(InfeasibleError) as caught:
        solve_offmate(profile, config, PaperProgram)
    assert caught.value.needed_bytes is None
    with pytest.raises(InfeasibleError, match=r"memory=1 GB is too small .* with any host memory"):
        smallest_host_budget(profile, paper(1), PaperProgram)


def test_switches_that_leave_no_option() -> None:
    profile = llama7b_b4(2)
    block = profile.blocks[1]
    only = replace(block, options=(block.option("recompute"),))
    with pytest.raises(ConfigError, match=r"recompute=False .* block model.layers.0, which offers recompute"):
        solve_offmate(
            replace(profile, blocks=(profile.blocks[0], only, *profile.blocks[2:])),
            paper(10, recompute=False),
            PaperProgram,
        )


def test_switches_are_obeyed() -> None:
    profile = llama7b_b4(4)
    assert "recompute" not in solve_offmate(profile, paper(7, recompute=False), PaperProgram).options
    assert "offload" not in solve_offmate(profile, paper(7, activation_offload=False), PaperProgram).options
    off = solve_offmate(profile, paper(8, host_update=False), PaperProgram)
    assert [flows.host_share for flows in off.flows] == [0.0] * len(off.flows)


def test_a_time_limit_that_is_too_short_is_named() -> None:
    with pytest.raises(ConfigError, match=r"solver_time_limit=0\.01 is too short"):
        solve_offmate(llama7b_b4(16), paper(8, time_limit=0.01), PaperProgram)


@pytest.mark.parametrize(
    "setting", [{"reach": 1}, {"gradient_reach": 0}, {"update_reach": 2}, {"lookahead": -1}, {"phi": -0.1}]
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"^{name}="):
        OffmateConfig(budget_bytes=None, **setting)


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


def test_another_user_of_highs_does_not_disturb() -> None:
    config = paper(8)
    before = solve_offmate(llama7b_b4(2), config, PaperProgram).iteration_s
    highspy.Highs.resetGlobalScheduler(True)
    for threads in (1, 2):
        other = highspy.Highs()
        other.setOptionValue("output_flag", False)
        other.setOptionValue("threads", threads)
        other.addCol(1.0, 0.0, 1.0, 0, [], [])
        other.run()
    assert solve_offmate(llama7b_b4(2), config, PaperProgram).iteration_s == pytest.approx(before, rel=1e-6)


def test_planning_needs_no_torch() -> None:
    code = "import sys, lt_offload.plan.planners.offmate.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_host_may_update_the_embedding_while_its_forward_waits() -> None:
    """Without that, its optimizer states must fit on the device, whatever the budget."""
    profile = llama7b_b4(layers=4)
    config = OffmateConfig(budget_bytes=None)

    class WithoutWaits(Program):
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
        assert again.budget_bytes == int(budget)
    with pytest.raises(InfeasibleError):
        series.solution(int(2e9), int(128e9), 60.0)
    assert series.solution(int(6e9), int(128e9), 60.0).iteration_s > 0
    with pytest.raises(ConfigError, match="too short"):
        series.solution(int(8e9), int(128e9), 0.0)


ALL_WAYS_TO_SOLVE = """
import pulp
from lt_offload.plan.planners import lp

problem = pulp.LpProblem("x", pulp.LpMaximize)
variable = problem.add_variable("x", 0, 1.5, cat=pulp.LpInteger)
problem += variable
ways = {}, {"method": "value"}, {"method": "again"}, {"gap": 0.1}
found = [(lp.run(problem, time_limit=60, **way), variable.value()) for way in ways]
assert found == [("solved", 1.5)] * 3 + [("solved", 1.0)], found
"""


def test_nothing_is_printed_while_programs_are_solved() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_WAYS_TO_SOLVE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
