"""What travels together lies side by side; how well the arena is filled."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from lt_offload import Plan, solve
from lt_offload.plan.assembly.groups import group_tensors
from lt_offload.plan.assembly.ops import Draft
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.check import check
from lt_offload.schema.accesses import IN_ARENA
from lt_offload.schema.plan import PlannerName
from tests import sampling
from tests.support.profiles.by_hand import built
from tests.support.profiles.fixtures import llama7b_b4
from tests.support.profiles.small import resident, small_profile


def test_no_mapping_of_host_memory_is_for_more_than_one_block() -> None:
    """While a mapping is made, its weights are there twice."""
    profile = small_profile(4)
    plan = built(streaming_decisions(profile, ("keep",) * 4, host_update=True), profile)
    blocks = defaultdict[tuple[str, int], set[int]](set)
    for group in plan.groups:
        if group.payload != "grad":
            blocks[group.payload, group.span].update(profile.tensors[tensor].blocks[0] for tensor in group.tensors)
    assert len(blocks) >= 4
    assert all(len(mine) == 1 for mine in blocks.values())


def draft(id: int, kind: Any, tensors: tuple[int, ...], offsets: tuple[int, ...] = ()) -> Draft:
    lane: Any = "h2d" if kind == "prefetch" else "none"
    return Draft(id=id, kind=kind, step=0, block=0, lane=lane, payload="weight", tensors=tensors, offsets=offsets)


def grouped(*drafts: Draft) -> list[tuple[int, ...]]:
    """The groups of five tensors of 512 bytes."""
    sizes = {"weight_bytes": [512] * 5, "state_bytes": [0] * 5, "first_block": [0] * 5}
    return [group.tensors for group in group_tensors(drafts, {}, **sizes).groups]


EVERYTHING = (0, 1, 2, 3, 4)
SIDE_BY_SIDE = (0, 512, 1024, 1536, 2048)


def test_a_gap_in_any_op_and_another_use_divide() -> None:
    gap = (0, 512, 2048, 2560, 3072)
    first, second = draft(0, "prefetch", EVERYTHING, SIDE_BY_SIDE), draft(1, "prefetch", EVERYTHING, gap)
    assert grouped(first, second, draft(2, "drop", (0, 1, 2, 3))) == [(0, 1), (2, 3), (4,)]


def test_sizes_and_members_of_groups_are_checked() -> None:
    profile = small_profile(2)
    plan = built(resident(profile), profile)
    first, *others = plan.groups
    for changed_group, words in (
        (replace(first, sizes=(512,)), "sizes: (512,) are not those"),
        (replace(first, tensors=(99,)), "the model has 2"),
        (replace(first, tensors=(1,)), "the weight of weight1 is in group 0"),
        (replace(first, tensors=()), "tensors: ()"),
        (replace(first, host_offset=0), "only gradients have one"),
    ):
        assert any(words in problem for problem in check(replace(plan, groups=(changed_group, *others)), profile))
    assert any(
        "is in none" in problem
        for problem in check(replace(plan, groups=(first, replace(first, tensors=()), *others[1:])), profile)
    )


def most_in_use(plan: Plan) -> int:
    """The peak of the arena's live bytes, as memory is taken and given back in the order of issue."""
    here, peak = {entry.group for entry in plan.initial}, 0
    releases = defaultdict[int, set[int]](set)
    for which in (*plan.passes, *plan.passes):
        ops = [op for op in plan.program(which) if op.payload in IN_ARENA]
        for step in range(len(plan.timeline)):
            for op in (op for op in ops if op.step == step):
                here = here - set(op.groups) if op.kind == "drop" else here | set(op.groups)
                if op.release_after is not None:
                    releases[op.release_after] |= set(op.groups)
                peak = max(peak, sum(plan.groups[group].bytes for group in here))
            here -= releases.pop(step, set())
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(("planner", "memory"), sampling.grid(["offmate", "greedy", "l2l"], ["9GB", "14GB"]))
def test_little_memory_is_wasted(planner: PlannerName, memory: str) -> None:
    plan = solve(llama7b_b4(14), memory=memory, planner=planner, time_limit=5)
    # A schedule leaves gaps where filling them would make copies wait; it has counted them.
    assert plan.arena_bytes <= 1.3 * most_in_use(plan)
