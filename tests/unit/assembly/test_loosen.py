"""More time for copies where memory is not short, and which steps count as time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.assembly.fit import loosen
from lt_offload.plan.assembly.plan import build
from lt_offload.plan.iteration.memory import framework_bytes
from lt_offload.plan.iteration.timeline import Pace
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from tests.support.profiles.program_rules import random_profile
from tests.support.profiles.small import HUGE, small_profile

KINDS = ("plain", "tied", "half", "lora", "frozen start")


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_time_is_taken_from_spare_memory_only(seed: int, earlier: bool) -> None:
    profile = random_profile(np.random.default_rng(seed), KINDS[seed % len(KINDS)])
    names = [[o.name for o in block.options] for block in profile.blocks]
    options = tuple("offload" if "offload" in found else found[0] for found in names)
    decisions = streaming_decisions(profile, options, host_update=True, lead=0, lag=0)
    peak = int(framework_bytes(decisions.usage, profile).max())
    for limit in (peak, int(1.3 * peak), HUGE):
        loosened = loosen(decisions, profile, limit, earlier=earlier)
        assert framework_bytes(loosened.usage, profile).max() <= limit
        for before, after in zip(decisions.blocks, loosened.blocks, strict=True):
            assert (after.release_after or 0) >= (before.release_after or 0)
            assert (after.prefetch_at or 0) <= (before.prefetch_at or 0)
            assert earlier or after.prefetch_at == before.prefetch_at
        for old, new in zip(decisions.tensors, loosened.tensors, strict=True):
            assert (new.grad_release_after or 0) >= (old.grad_release_after or 0)
            assert replace(new, grad_release_after=None) == replace(old, grad_release_after=None)
        plan = build(loosened, profile, planner="test", budget_bytes=HUGE, host_budget_bytes=HUGE)
        assert check(plan, profile) == []
        if limit == HUGE and not earlier:
            stiff = build(decisions, profile, planner="test", budget_bytes=HUGE, host_budget_bytes=HUGE)
            assert simulate(plan, profile).iteration_time <= simulate(stiff, profile).iteration_time * (1 + 1e-9)
    assert loosen(decisions, profile, HUGE, earlier=earlier) != decisions


def test_steps_without_work_do_not_count() -> None:
    profile = small_profile(4)
    norm = profile.blocks[2]
    options = tuple(replace(option, forward_s=0.01, backward_s=0.01) for option in norm.options)
    pace = Pace(replace(profile, blocks=(*profile.blocks[:2], replace(norm, options=options), profile.blocks[3])))
    # Steps 0 to 7; block 2 is at steps 2 and 5.
    assert [pace.later(1, count) for count in (0, 1, 2)] == [1, 3, 4]
    assert [pace.earlier(6, count) for count in (0, 1, 2)] == [6, 4, 3]
    assert pace.later(7, 3) == 7
    assert pace.earlier(0, 3) == 0
