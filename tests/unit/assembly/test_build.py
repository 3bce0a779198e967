"""From fractions to whole tensors to ops: hand-made cases, and arbitrary solutions of arbitrary models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.offmate.rounding import nearest_subset, round_tensors
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from tests.support.profiles.by_hand import built, scheduled
from tests.support.profiles.program_rules import KINDS, random_profile
from tests.support.profiles.random_solutions import random_solution
from tests.support.profiles.small import (
    changed,
    named,
    resident,
    small_profile,
    stays,
    waits_for,
)

# -- ops ---------------------------------------------------------------------------------------------------------------


def test_a_range_is_written_after_its_last_users_have_gone() -> None:
    profile = small_profile(3, states=0)
    decisions = changed(resident(profile), 1, TensorDecision(place="device", stays=stays((4, 1)), write_back=4))
    decisions = changed(decisions, 2, TensorDecision(place="device", stays=stays((2, 3)), write_back=3))
    plan = built(decisions, profile)
    assert named(plan, "2 prefetch weight 2").offsets == named(plan, "4 prefetch weight 1").offsets
    assert waits_for(plan, "2 prefetch weight 2") == {"-3 offload weight 2", "1 drop weight 1"}
    assert waits_for(plan, "4 prefetch weight 1") == {"-4 offload weight 1", "3 drop weight 2"}
    assert check(plan, profile) == []


# -- rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_nearest_subset_equals_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 1000, 9)]
    target = float(rng.uniform(0, sum(sizes)))
    sums = [sum(size for bit, size in enumerate(sizes) if mask >> bit & 1) for mask in range(2**9)]
    error = abs(sum(sizes[at] for at in nearest_subset(sizes, target)) - target)
    # Each size is rounded to a 2000th of their sum.
    assert error <= min(abs(total - target) for total in sums) + 2 * 9 * sum(sizes) / 2000


# -- any solution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_solution_becomes_a_plan_without_violations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, KINDS[seed % len(KINDS)])
    decisions = round_tensors(random_solution(rng, profile), profile)
    assert check(scheduled(decisions, profile), profile) == [], "in as little as is surely enough"
    plan = scheduled(decisions, profile, share=rng.uniform(1, 1.5))
    assert check(plan, profile) == []
    peak = simulate(plan, profile).device_peak
    assert check(replace(plan, budget_bytes=peak), profile) == []
    assert "budget" in check(replace(plan, budget_bytes=peak - 1), profile)[0]


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("states", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_very_short_models(blocks: int, tied: bool, states: int, seed: int) -> None:
    profile = small_profile(blocks, tied=tied and blocks > 1, states=states)
    rng = np.random.default_rng(seed)
    decisions = round_tensors(random_solution(rng, profile), profile)
    assert check(scheduled(decisions, profile, share=rng.uniform(1, 1.5)), profile) == []


@pytest.mark.parametrize("host_update", [False, True])
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_streaming_everything(host_update: bool, lead: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, KINDS[seed % len(KINDS)])
    options = random_solution(rng, profile).options
    plan = built(streaming_decisions(profile, options, host_update=host_update), profile, lead=lead, lag=lead)
    assert check(plan, profile) == []
    if lead == 0 and host_update:
        largest = max(sum(t.bytes for t in profile.tensors if b in t.blocks) for b in range(len(profile.blocks)))
        assert plan.arena_bytes <= largest * 1.01, "no more than one block is on the device"


def test_notes_say_what_every_plan_takes() -> None:
    profile = replace(small_profile(2), slack_bytes=3000)
    note = "taken by every plan: 50 B before the first tensor, 20 B for what all blocks share, 3 kB for the allocator's"
    assert any(found.startswith(note) for found in built(resident(profile), profile).notes)
    free = replace(profile, slack_bytes=0, shared_bytes=0, hardware=replace(profile.hardware, context_bytes=0))
    assert not any("taken by every plan" in found for found in built(resident(free), free).notes)


@pytest.mark.parametrize("seed", range(15))
def test_prefetches_of_a_step_are_queued_in_the_order_of_need(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, KINDS[seed % len(KINDS)])
    plan = built(round_tensors(random_solution(rng, profile), profile), profile, lead=2, lag=1)
    needs: dict[int, list[int]] = {}
    for op in plan.ops:
        if op.kind in ("forward", "backward", "update"):
            for other in op.after:
                needs.setdefault(other, []).append((op.step - plan.ops[other].step) % len(plan.timeline))
    for step in range(len(plan.timeline)):
        waits = [min(needs[op.id]) for op in plan.ops if op.step == step and op.kind == "prefetch" and op.id in needs]
        assert waits == sorted(waits)
