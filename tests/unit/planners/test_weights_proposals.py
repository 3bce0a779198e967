"""The planners greedy and l2l on profiles: what they propose can be scheduled, passes the checks and is as said."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lt_offload.plan.assembly.just_in_time import Misfit
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.papers.weights.propose import propose_greedy, propose_l2l
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request, allowed_options
from lt_offload.plan.planners.timed_plan import timed_plan
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles.fixtures import GB, llama7b_b4
from tests.support.profiles.small import small_profile


def request(profile: Profile, budget: float, *, host_budget: float = 1e15, **switches: Any) -> Request:
    config = OffmateConfig(budget_bytes=int(budget), **switches)
    return Request(
        profile=profile,
        budget_bytes=int(budget),
        host_budget_bytes=int(host_budget),
        allowed=tuple(allowed_options(block, config) for block in profile.blocks),
        settings=Settings(**switches),
    )


def fitted(proposal: Proposal, asked: Request) -> Plan | None:
    """Return the checked plan, or None if it cannot be brought into the budget."""
    found = timed_plan(proposal.name, proposal.decisions, asked)
    if isinstance(found, Misfit):
        return None
    assert check(found.plan, asked.profile) == [], proposal.name
    return found.plan


def seconds(plan: Plan, profile: Profile) -> float:
    return simulate(plan, profile).iteration_time


def by_place(decisions: Decisions) -> Counter[str]:
    return Counter(tensor.place for tensor in decisions.tensors)


def test_l2l_fetches_every_weight_twice() -> None:
    profile = small_profile(5)
    asked = request(profile, 20_000)
    (proposal,) = propose_l2l(asked)
    plan = fitted(proposal, asked)
    assert plan is not None
    assert by_place(proposal.decisions) == {"host": 5}
    fetched = Counter(op.block for op in plan.ops if op.kind == "prefetch" and op.payload == "weight")
    # Between the last block's forward and its backward nothing could be gained.
    assert fetched == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1}
    dropped = Counter(op.step for op in plan.ops if op.kind == "drop")
    assert dropped == dict.fromkeys((0, 1, 2, 3, 5, 6, 7, 8, 9), 1), "each after its use"
    assert plan.options == ("recompute",) * 5


def test_too_little_memory_or_ram() -> None:
    profile = small_profile(5)
    for propose, message in (
        (propose_greedy, "with every weight absent between its uses, .* are needed and there are"),
        (propose_l2l, "one layer at a time with its activations recomputed needs .* more device memory"),
    ):
        for budget in (60, 2_000):
            with pytest.raises(NotApplicable, match=message):
                propose(request(profile, budget))
        with pytest.raises(NotApplicable, match="host copies need .* more RAM"):
            propose(request(profile, 10_000, host_budget=1000))
        assert propose(request(profile, 10_000))


@pytest.mark.slow
def test_a_large_model() -> None:
    profile = llama7b_b4()
    asked = request(profile, 10 * GB)
    plans = {
        proposal.name: plan
        for proposal in (*propose_l2l(asked), *propose_greedy(asked))
        if (plan := fitted(proposal, asked)) is not None
    }
    assert len(plans) == 4
    times = {name: seconds(plan, profile) for name, plan in plans.items()}
    # The host's update of all 27 GB at 1.1 GB/s takes 24.5 s.
    assert 24 < times.pop("l2l") < 26
    # Without any offload it would be 11.88 s.
    assert 11.8 < min(times.values()) < 12.5
