"""Gradients that share host memory: never two at one address, whatever takes how long, and no slower for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.assembly.copies import SMALL
from lt_offload.plan.iteration.memory import host_bytes, lasting_host_bytes
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.slots import share_slots
from lt_offload.plan.solve import solve
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.explain import explain
from lt_offload.schema.plan import ALIGNMENT, Op, Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import (
    HUGE,
    all_on_the_host,
    chained,
    small_profile,
    with_op,
    with_zero_copy,
)

BLOCKS = 6


def on_the_host(seconds: float) -> tuple[Plan, Profile]:
    profile, decisions = all_on_the_host(BLOCKS, seconds)
    return built(decisions, profile, lag=1), profile


def shared(plan: Plan, profile: Profile, room: int = HUGE) -> Plan:
    """``plan`` with shared slots, for which the host has ``room`` bytes."""
    plan = replace(plan, host_budget_bytes=host_bytes(plan, profile) - plan.gradient_bytes + room)
    return share_slots(plan, profile, simulate(plan, profile))[0]


def arrivals(plan: Plan) -> list[Op]:
    return [op for op in plan.ops if op.payload == "grad" and op.lane == "d2h"]


def place(plan: Plan, op: Op) -> tuple[int, int]:
    """Where the gradients of ``op`` are on the host."""
    (group,) = (plan.groups[number] for number in op.groups)
    assert group.host_offset is not None
    return group.host_offset, group.host_offset + group.bytes


def crosses(plan: Plan, one: Op, other: Op) -> bool:
    (low, high), (other_low, other_high) = place(plan, one), place(plan, other)
    return low < other_high and other_low < high


def with_slot(plan: Plan, op: Op, slot: int | None) -> Plan:
    groups = list(plan.groups)
    groups[op.groups[0]] = replace(groups[op.groups[0]], host_offset=slot)
    return replace(plan, groups=tuple(groups))


def updates(plan: Plan, op: Op) -> list[Op]:
    return [o for o in plan.ops if o.kind == "update" and set(plan.tensors(o)) & set(plan.tensors(op))]


def overwritten(plan: Plan, profile: Profile) -> list[tuple[int, int]]:
    """Pairs of copies in one iteration, the later of which begins before the earlier one's update has ended."""
    spans = {span.op: span for span in simulate(plan, profile).spans}
    ops = arrivals(plan)
    return [
        (one.id, other.id)
        for at, one in enumerate(ops)
        for other in ops[at + 1 :]
        if crosses(plan, one, other)
        and any(spans[update.id].end > spans[other.id].start + 1e-9 for update in updates(plan, one))
    ]


def twice(profile: Profile) -> Profile:
    """Two tensors instead of each, so that gradients of one step may leave in different ops."""
    tensors = [replace(t, name=f"{t.name}{part}") for t in profile.tensors for part in "ab"]
    return replace(profile, tensors=tuple(tensors))


@pytest.mark.parametrize("seed", range(24))
def test_no_gradient_is_overwritten_however_long_things_take(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = chained(twice(small_profile(int(rng.integers(2, 7)), tied=bool(seed % 2))))
    profile = with_zero_copy(profile) if seed % 3 == 0 else profile
    optimizer = replace(profile.optimizer, host_bytes_per_s=float(rng.choice([20.0, 60.0, 500.0])))
    profile = replace(profile, optimizer=optimizer)
    decisions = random_decisions(rng, profile)
    plan = built(decisions, profile, lag=int(rng.integers(3)))
    assert check(plan, profile) == []
    lasting = lasting_host_bytes(plan.options, decisions.usage(profile).grad_zero_copy, profile)
    least = decisions.least_host_bytes(profile) - lasting
    for room in {HUGE, least, (least + plan.gradient_bytes) // 2}:
        found = shared(plan, profile, room)
        assert found.gradient_bytes <= room
        assert check(found, profile) == []
        assert host_bytes(found, profile) == lasting + found.gradient_bytes
        for _ in range(5):
            ops = tuple(replace(op, seconds=op.seconds * float(rng.uniform(0.1, 10))) for op in found.ops)
            assert overwritten(replace(found, ops=ops), profile) == []


def test_gradients_of_one_step_never_share() -> None:
    profile, size = twice(small_profile(3)), SMALL // 2 + ALIGNMENT
    profile = replace(profile, tensors=tuple(replace(tensor, bytes=size) for tensor in profile.tensors))
    decisions = streaming_decisions(profile, ("keep",) * 3, host_update=True)
    plan = built(decisions, profile, lag=1)
    least = decisions.least_host_bytes(profile) - lasting_host_bytes(plan.options, (), profile)
    found = shared(plan, profile, least)
    assert found.gradient_bytes == least == 2 * size
    by_step = [[op for op in arrivals(found) if op.step == step] for step in range(3, 6)]
    assert max(map(len, by_step)) == 2
    assert not any(crosses(plan, one, other) for one, other in (pair for pair in by_step if len(pair) == 2))


def test_memory_is_shared_without_loss_of_time_where_updates_keep_up() -> None:
    plan, profile = on_the_host(5.0)
    trace = simulate(plan, profile)
    found, after = share_slots(plan, profile, trace)
    assert plan.gradient_bytes == BLOCKS * 1024
    assert found.gradient_bytes == 1024
    assert after.iteration_time == trace.iteration_time
    assert after.host_peak == trace.host_peak - (BLOCKS - 1) * 1024
    # In a steady state as well with updates that are 10 % slower, where nothing waits for them.
    slower = replace(profile, optimizer=replace(profile.optimizer, host_bytes_per_s=1000 / 5.5))
    assert shared(plan, slower).gradient_bytes == 1024


def test_all_gradients_may_be_there_where_updates_are_slow() -> None:
    plan, profile = on_the_host(200.0)
    assert shared(plan, profile).gradient_bytes == BLOCKS * 1024


def test_copies_wait_where_ram_is_short() -> None:
    plan, profile = on_the_host(30.0)
    ample = shared(plan, profile)
    short = shared(plan, profile, 1024)
    assert ample.gradient_bytes > 1024 == short.gradient_bytes
    assert simulate(short, profile).iteration_time > simulate(ample, profile).iteration_time
    assert check(short, profile) == []


# -- what check() finds ------------------------------------------------------------------------------------------------


def short() -> tuple[Plan, Profile]:
    plan, profile = on_the_host(30.0)
    return shared(plan, profile, 2048), profile


SHORT, PROFILE = short()
RING = [(op, other) for op in arrivals(SHORT) for other in op.after if SHORT.ops[other].lane == "host"]


def test_there_is_something_to_break() -> None:
    assert check(SHORT, PROFILE) == []
    assert len([op for op, other in RING if other < op.id]) >= 3


@pytest.mark.parametrize(("op", "other"), [(op.id, other) for op, other in RING if other < op.id])
def test_a_copy_that_does_not_wait_is_found(op: int, other: int) -> None:
    left = tuple(o for o in SHORT.ops[op].after if o != other)
    found = check(with_op(SHORT, SHORT.ops[op], after=left), PROFILE)
    assert any(v.startswith(f"op {op} ") and f"not ordered after op {other} " in v for v in found), found


@pytest.mark.parametrize("op", [op.id for op in arrivals(SHORT)[1:]])
def test_a_shifted_slot_is_found(op: int) -> None:
    """Each has one of two places; half in both, it would overwrite what it does not wait for."""
    found = check(with_slot(SHORT, SHORT.ops[op], 512), PROFILE)
    assert any("not ordered after" in v and "grad" in v for v in found), found


def test_single_slots_are_checked() -> None:
    op = arrivals(SHORT)[0]
    for slot, words in (
        (None, "have one"),
        (8, "multiple of 512"),
        (-512, "size is negative"),
        (2048, "the extent is"),
    ):
        found = check(with_slot(SHORT, op, slot), PROFILE)
        assert any(
            v.startswith((f"op {op.id} ", f"group {op.groups[0]}:", f"groups.{op.groups[0]}:")) and words in v
            for v in found
        ), found


def test_a_gradient_that_nobody_has_read_is_not_overwritten() -> None:
    profile = twice(small_profile(3))
    tensors = tuple(replace(tensor, bytes=SMALL // 2 + ALIGNMENT) for tensor in profile.tensors)
    profile = replace(profile, tensors=tensors)
    plan = built(streaming_decisions(profile, ("keep",) * 3, host_update=True), profile)
    one, other = [op for op in arrivals(plan) if op.step == 3]
    found = check(with_slot(plan, other, place(plan, one)[0]), profile)
    assert any(v.startswith(f"op {other.id} ") and "which no update has read" in v for v in found), found


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_found_that_needs_to_share() -> None:
    _, profile = on_the_host(30.0)
    ample = solve(profile, planner="l2l", memory=HUGE, host_memory=HUGE)
    lasting = host_bytes(ample, profile) - ample.gradient_bytes
    tight = solve(profile, planner="l2l", memory=HUGE, host_memory=lasting + 1024)
    assert tight.gradient_bytes == 1024 < ample.gradient_bytes
    assert tight.predicted.host_peak_bytes == lasting + 1024
    assert tight.predicted.iteration_s >= ample.predicted.iteration_s
    assert "; 1.02 kB for gradients, in which 6 kB take turns" in " ".join(explain(tight).split())
