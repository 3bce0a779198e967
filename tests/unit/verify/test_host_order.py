"""The host takes the update that is needed first: deadlines, and how the simulator and the checker see that lane."""

from __future__ import annotations

from dataclasses import replace

from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan, deadlines
from lt_offload.schema.profile import Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.small import all_on_the_host, with_op

BLOCKS = 5


def planned(seconds: float) -> tuple[Plan, Profile]:
    """Every weight is fetched one step before its forward."""
    profile, decisions = all_on_the_host(BLOCKS, seconds)
    return built(decisions, profile, lead=1, lag=1), profile


def test_a_deadline_is_the_first_op_that_waits() -> None:
    plan, _ = planned(1.0)
    updates = {op.block: op.id for op in plan.ops if op.kind == "update"}
    fetches = {op.block: op.id for op in plan.ops if op.kind == "prefetch"}
    assert deadlines(plan.ops) == {updates[block]: fetches[block] + len(plan.ops) for block in range(BLOCKS)}


def test_the_host_takes_the_update_that_is_needed_first() -> None:
    plan, profile = planned(45.0)
    assert check(plan, profile) == []
    spans = sorted(
        (span.start, plan.ops[span.op].block) for span in simulate(plan, profile).spans if span.lane == "host"
    )
    # Backwards take 20 s: while the host updates block 4, the gradients of 3 and 2 arrive. The first of all comes last.
    assert [block for _, block in spans] == [4, 2, 0, 1, 3]


def test_an_order_of_arrival_would_be_slower() -> None:
    plan, profile = planned(45.0)
    updates = [op.id for op in plan.ops if op.kind == "update"]
    chained = list(plan.ops)
    for earlier, later in zip(updates, updates[1:], strict=False):
        chained[later] = replace(chained[later], after=(*chained[later].after, earlier))
    in_order = replace(plan, ops=tuple(chained))
    assert check(in_order, profile) == []
    assert simulate(plan, profile).iteration_time < simulate(in_order, profile).iteration_time


def test_the_end_of_one_update_says_nothing_about_another() -> None:
    plan, profile = planned(1.0)
    updates = {op.block: op.id for op in plan.ops if op.kind == "update"}
    fetch = next(op for op in plan.ops if op.kind == "prefetch" and op.block == 3)
    # Block 2's gradient arrives later, so on a lane that kept the order its update would come after that of block 3.
    after = tuple(updates[2] if other == updates[3] else other for other in fetch.after)
    assert after != fetch.after
    found = check(with_op(plan, fetch, after=after), profile)
    assert any(f"op {fetch.id} " in line and f"op {updates[3]} " in line for line in found), found
