"""From fractions to whole tensors to ops: hand-made cases, and arbitrary solutions of arbitrary models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.iteration.memory import framework_bytes, usage
from lt_offload.plan.iteration.timeline import Pace
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.offmate.rounding import nearest_subset, round_tensors
from lt_offload.plan.planners.offmate.solution import GroupFlows, Solution, groups
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.profile import Profile
from tests.support.profiles.by_hand import built, scheduled
from tests.support.profiles.program_rules import random_profile
from tests.support.profiles.random_solutions import random_solution
from tests.support.profiles.small import (
    HUGE,
    changed,
    named,
    resident,
    small_profile,
    stays,
    waits_for,
    with_options,
    words,
)

KINDS = ("plain", "tied", "half", "lora", "frozen start")


# -- ops ---------------------------------------------------------------------------------------------------------------


def test_all_resident_has_computations_and_updates_only() -> None:
    profile = small_profile(2, frozen=(1,))
    plan = built(resident(profile), profile)
    assert [words(op) for op in plan.ops] == [
        "0 forward 0",
        "1 forward 1",
        "2 backward 1",
        "3 backward 0",
        "3 update 0",
    ]
    start = [(plan.groups[entry.group], entry.offset) for entry in plan.initial]
    assert [(group.payload, group.tensors, offset) for group, offset in start] == [
        ("weight", (0,), 0),
        ("state", (0,), 2048),
        ("weight", (1,), 1024),
    ], "the weights lie side by side, and so do the states"
    assert plan.update_places == ("device", "none")
    assert plan.arena_bytes == 4096
    assert check(plan, profile) == []


def test_a_streamed_block_is_issued_in_the_order_of_the_contract() -> None:
    profile = small_profile(3)
    decisions = changed(
        resident(profile),
        1,
        TensorDecision(
            place="paged",
            stays=stays((1, 1), (4, 5)),
            write_back=4,
        ),
    )
    decisions = with_options(decisions, "keep", "offload", "keep")
    plan = built(decisions, profile, lead=1, lag=1, activations={1: (2, 4)})
    assert [words(op) for op in plan.ops] == [
        "0 prefetch weight 1",
        "0 forward 0",
        "1 forward 1",
        "1 offload activation 1",
        "1 drop weight 1",
        "2 forward 2",
        "3 prefetch weight 1",
        "3 prefetch state 1",
        "3 backward 2",
        "3 update 2",
        "4 prefetch activation 1",
        "4 backward 1",
        "4 update 1",
        "4 offload weight 1",
        "4 offload state 1",
        "5 backward 0",
        "5 update 0",
        "5 drop weight 1",
    ]
    assert "-4 offload weight 1" in waits_for(plan, "0 prefetch weight 1")
    assert waits_for(plan, "1 forward 1") == {"0 prefetch weight 1"}
    assert "-4 offload weight 1" in waits_for(plan, "3 prefetch weight 1")
    assert "-4 offload state 1" in waits_for(plan, "3 prefetch state 1")
    assert waits_for(plan, "4 prefetch activation 1") == {"1 offload activation 1", "3 update 2"}
    assert waits_for(plan, "4 backward 1") == {"3 prefetch weight 1", "4 prefetch activation 1"}
    assert waits_for(plan, "4 update 1") == {"3 prefetch state 1", "4 backward 1"}
    assert waits_for(plan, "4 offload weight 1") == {"4 update 1"}
    assert waits_for(plan, "5 drop weight 1") == {"4 offload weight 1", "5 update 0"}
    # Activations leave until the end of step 2: what is computed next takes their memory.
    assert waits_for(plan, "3 backward 2") == {"1 offload activation 1"}
    assert named(plan, "4 offload state 1").release_after == 4
    assert check(plan, profile) == []


def test_a_range_is_written_after_its_last_users_have_gone() -> None:
    profile = small_profile(3, states=0)
    decisions = changed(resident(profile), 1, TensorDecision(place="device", stays=stays((4, 1)), write_back=4))
    decisions = changed(decisions, 2, TensorDecision(place="device", stays=stays((2, 3)), write_back=3))
    plan = built(decisions, profile)
    assert named(plan, "2 prefetch weight 2").offsets == named(plan, "4 prefetch weight 1").offsets
    assert waits_for(plan, "2 prefetch weight 2") == {"-3 offload weight 2", "1 drop weight 1"}
    assert waits_for(plan, "4 prefetch weight 1") == {"-4 offload weight 1", "3 drop weight 2"}
    assert check(plan, profile) == []


def test_a_host_update_stands_between_gradient_and_next_fetch() -> None:
    profile = small_profile(3)
    decision = TensorDecision(place="host", stays=stays((1, 1), (4, 4)))
    plan = built(changed(resident(profile), 1, decision), profile, lead=1, lag=1)
    assert waits_for(plan, "4 offload grad 1") == {"4 backward 1"}
    assert waits_for(plan, "4 update 1") == {"4 offload grad 1"}
    assert named(plan, "4 update 1").lane == "host"
    assert named(plan, "4 update 1").seconds == 1000 / profile.optimizer.host_bytes_per_s
    assert "-4 update 1" in waits_for(plan, "0 prefetch weight 1")
    assert "-4 offload grad 1" in waits_for(plan, "0 forward 0"), "the gradient's memory is free at the end of step 5"
    assert check(plan, profile) == []


def test_the_activations_a_step_needs_are_fetched_before_the_weights_it_needs() -> None:
    profile = small_profile(4)
    options = ("offload",) * 4
    plan = built(streaming_decisions(profile, options, host_update=True), profile, lead=1, lag=1)
    for step in range(4, 7):
        payloads = [op.payload for op in plan.ops if op.step == step and op.kind == "prefetch"]
        assert payloads == sorted(payloads, key=str)
        assert set(payloads) == {"activation", "weight"}


def test_tied_tensors_are_updated_after_their_last_gradient() -> None:
    profile = small_profile(3, tied=True)
    plan = built(streaming_decisions(profile, ("keep",) * 3, host_update=False), profile, lead=1)
    assert plan.tensors(named(plan, "5 update 0")) == (0,)
    assert check(plan, profile) == []
    gradient = framework_bytes(usage(plan), profile)
    frozen = small_profile(3, frozen=(0, 1, 2))
    alone = framework_bytes(usage(built(resident(frozen), frozen)), frozen)
    # Held from the head's backward on; block 1's own passes by; at last the second one is there beside it.
    assert (gradient - alone).tolist() == [0, 0, 0, 1000, 2000, 2000]


def test_without_states_nothing_is_paged() -> None:
    profile = small_profile(3, states=0)
    plan = built(streaming_decisions(profile, ("keep",) * 3, host_update=False), profile)
    assert set(plan.update_places) == {"device"}
    assert not [op for op in plan.ops if op.payload == "state"]
    assert check(plan, profile) == []


def test_frozen_weights_are_never_written_back() -> None:
    profile = small_profile(4, frozen=(0, 1, 2), no_backward=2)
    plan = built(streaming_decisions(profile, ("keep",) * 4, host_update=True), profile)
    assert {
        t for op in plan.ops if op.payload in ("weight", "grad") and op.kind == "offload" for t in plan.tensors(op)
    } == {3}
    # Blocks without a backward need their weights in the forward only.
    assert [op.step for op in plan.ops if op.kind == "prefetch" and plan.tensors(op) == (0,)] == [0]
    assert [op.step for op in plan.ops if op.kind == "prefetch" and plan.tensors(op) == (2,)] == [2, 5]
    assert check(plan, profile) == []


# -- rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "target", "best"),
    [
        ([5, 3, 2], 0, []),
        ([5, 3, 2], 4.9, [0]),
        ([5, 3, 2], 7.2, [0, 2]),
        ([5, 3, 2], 100, [0, 1, 2]),
        ([5, 3, 2], -1, []),
        ([], 3, []),
    ],
)
def test_nearest_subset(sizes: list[int], target: float, best: list[int]) -> None:
    assert sum(sizes[at] for at in nearest_subset(sizes, target)) == sum(sizes[at] for at in best)


@pytest.mark.parametrize("seed", range(10))
def test_nearest_subset_equals_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 1000, 9)]
    target = float(rng.uniform(0, sum(sizes)))
    sums = [sum(size for bit, size in enumerate(sizes) if mask >> bit & 1) for mask in range(2**9)]
    error = abs(sum(sizes[at] for at in nearest_subset(sizes, target)) - target)
    # Each size is rounded to a 2000th of their sum.
    assert error <= min(abs(total - target) for total in sums) + 2 * 9 * sum(sizes) / 2000


def four_tensors(share: float) -> tuple[Profile, Solution]:
    """Four blocks of four equal tensors, of which the host shall update ``share``."""
    small = small_profile(4)
    tensors = [replace(small.tensors[0], name=f"{b}.{i}", blocks=(b,)) for b in range(4) for i in range(4)]
    profile = replace(small, tensors=tuple(tensors))
    flow = np.zeros(8)
    flows = GroupFlows(
        host_share=share,
        resident=np.ones(8) - share,
        prefetch=np.eye(8)[4],
        write_back=flow,
        grad_offload=np.eye(8)[1],
        host_update=np.eye(8)[2],
        state_resident=np.ones(8) - share,
        state_prefetch=flow,
        state_offload=flow,
    )
    found = groups(profile)
    solution = Solution(
        groups=found,
        flows=tuple(replace(flows, host_share=share if group.blocks[0] else 0.0) for group in found),
        options=("keep",) * 4,
        step_s=(1.0,) * 8,
        iteration_s=8.0,
        bound_s=8.0,
        budget_bytes=HUGE,
    )
    return profile, solution


@pytest.mark.parametrize(("share", "counts"), [(0.0, [0, 0, 0]), (1.0, [4, 4, 4]), (0.5, [2, 2, 2]), (0.4, [2, 1, 2])])
def test_the_error_of_a_share_is_carried_to_the_next_block(share: float, counts: list[int]) -> None:
    profile, solution = four_tensors(share)
    decisions = round_tensors(solution, profile)
    places = [decision.place for decision in decisions.tensors]
    assert [places[4 * block : 4 * block + 4].count("host") for block in (1, 2, 3)] == counts
    assert "host" not in places[:4], "the first block has no time for a host update"


def test_updated_tensors_leave_when_the_flow_passes_their_middle() -> None:
    profile, solution = four_tensors(0.0)
    tau = np.arange(8)
    # Block 1 is updated in step 6 and used again in step 1, tau 3; its backward is tau 0 = 8.
    flows = replace(
        solution.flows[1],
        resident=np.where((tau == 0) | (tau == 3), 1.0, np.where(tau == 4, 0.5, np.where(tau < 3, 1.0, 0.0))),
        prefetch=np.array([0, 0, 0, 0, 0, 0, 0.25, 0.75]),
        write_back=np.array([0, 0, 0.5, 0.5, 0, 0, 0, 0]),
    )
    solution = replace(solution, flows=(solution.flows[0], flows, *solution.flows[2:]))
    found = round_tensors(solution, profile).tensors[4:8]
    step = [(6 + at) % 8 for at in range(8)]
    # A copy that runs during a tau is queued after the computation before; the weights are there until then.
    assert [decision.write_back for decision in found] == [step[1], step[1], step[2], step[2]]
    assert [decision.stays for decision in found] == [stays((step[0], step[3]))] * 4


# -- any solution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_solution_becomes_a_plan_without_violations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, KINDS[seed % len(KINDS)])
    plan = scheduled(round_tensors(random_solution(rng, profile), profile), profile, share=rng.uniform(1, 1.5))
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
