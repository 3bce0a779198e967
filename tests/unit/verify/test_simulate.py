"""The simulator on cases that can be worked out by hand, and against what no plan can beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_offload.errors import PlanError
from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.offmate.rounding import round_tensors
from lt_offload.plan.verify.simulate import simulate
from tests.support.profiles.by_hand import built
from tests.support.profiles.program_rules import random_profile
from tests.support.profiles.random_solutions import random_solution
from tests.support.profiles.small import changed, named, resident, small_profile, stays, with_op


def test_a_resident_plan_lasts_as_long_as_its_computations() -> None:
    profile = small_profile(3)
    trace = simulate(built(resident(profile), profile), profile)
    # three forwards of 10 s, three backwards of 20 s, three updates of 1000 bytes at 1000 bytes per second
    assert trace.iteration_time == pytest.approx(93)
    assert trace.busy("compute") == pytest.approx(93)
    assert trace.busy("h2d") == trace.busy("d2h") == trace.busy("host") == 0
    assert [span.label for span in trace.spans][:4] == ["forward 0", "forward 1", "forward 2", "backward 2"]
    assert [(span.start, span.end) for span in trace.spans][:4] == [(0, 10), (10, 20), (20, 30), (30, 50)]
    assert trace.source == "simulated"


def test_a_copy_that_nothing_hides_is_waited_for() -> None:
    profile = small_profile(3)
    # The first block's weight is fetched in its own step, after the update on the host: 5 s out, 10 s update, 10 s in.
    decision = TensorDecision(place="host", stays=stays((0, 5)))
    trace = simulate(built(changed(resident(profile), 0, decision), profile), profile)
    assert trace.iteration_time == pytest.approx(3 * 30 + 2 + 5 + 10 + 10)
    assert trace.busy("host") == pytest.approx(10)


def test_memory_is_counted_by_step() -> None:
    profile = small_profile(3)
    plan = built(resident(profile), profile)
    trace = simulate(plan, profile)
    arena = 3 * (1024 + 2048)
    fixed = arena + 50 + 20
    assert plan.arena_bytes == arena
    held = 300 + 10  # saved, and the input of the blocks after the first
    gradient = 1000
    expected = [
        fixed + 300 + 10 + 5,
        fixed + 300 + (300 + 10 + 10) + 5,
        fixed + 300 + held + (300 + 10) + 5,
        fixed + 300 + held + 300 + 2 * 10 + 7 + gradient,
        fixed + 300 + 300 + 2 * 10 + 10 + 7 + gradient,
        fixed + 300 + 10 + 7 + gradient,
    ]
    assert [size for _, size in trace.memory] == expected
    assert trace.device_peak == max(expected)
    assert trace.host_peak == 3 * (1000 + 2000)


@pytest.mark.parametrize("seed", range(12))
def test_infinite_links_leave_the_computations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, ("plain", "tied", "half", "lora")[seed % 4])
    profile = replace(
        profile,
        blocks=tuple(replace(block, launch_s=0.0) for block in profile.blocks),
        hardware=replace(profile.hardware, h2d_bytes_per_s=1e30, d2h_bytes_per_s=1e30),
        optimizer=replace(profile.optimizer, host_bytes_per_s=1e30),
    )
    solution = random_solution(rng, profile)
    plan = built(round_tensors(solution, profile), profile)
    trace = simulate(plan, profile)
    options = [block.option(name) for block, name in zip(profile.blocks, solution.options, strict=True)]
    seconds = sum(
        o.forward_s + (o.backward_s if block.has_backward else 0)
        for o, block in zip(options, profile.blocks, strict=True)
    )
    updated = [
        t.bytes for t, place in zip(profile.tensors, plan.update_places, strict=True) if place in ("device", "paged")
    ]
    assert trace.iteration_time == pytest.approx(seconds + sum(updated) / profile.optimizer.device_bytes_per_s)


@pytest.mark.parametrize("seed", range(12))
def test_no_lane_works_longer_than_the_iteration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, ("plain", "tied", "half", "lora", "frozen start")[seed % 5])
    plan = built(round_tensors(random_solution(rng, profile), profile), profile)
    trace = simulate(plan, profile)
    for lane in ("compute", "h2d", "d2h", "host"):
        work = sum(op.seconds for op in plan.ops if op.lane == lane)
        assert trace.iteration_time >= work * (1 - 1e-9)
    launches = sum(b.launch_s * (1 + b.has_backward) for b in profile.blocks)
    assert trace.iteration_time >= launches * (1 - 1e-9)
    assert all(span.start >= 0 and span.end >= span.start for span in trace.spans)
    assert list(trace.memory) == sorted(trace.memory, key=lambda item: item[0])


def test_ops_wait_for_what_they_name_and_for_their_lane() -> None:
    profile = small_profile(5)
    plan = built(streaming_decisions(profile, ("offload",) * 5, host_update=True), profile, lead=1, lag=1)
    spans = {span.op: span for span in simulate(plan, profile).spans}
    for op in plan.ops:
        for other in op.after:
            if op.id in spans and other in spans and other < op.id:
                assert spans[other].end <= spans[op.id].start + 1e-9
    for lane in ("compute", "h2d", "d2h", "host"):
        queue = [spans[op.id] for op in plan.ops if op.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in zip(queue, queue[1:], strict=False))


def test_a_slow_launch_is_waited_for() -> None:
    profile = small_profile(3, launch_s=50.0, speed=1e9)
    assert simulate(built(resident(profile), profile), profile).iteration_time == pytest.approx(6 * 50)


def test_deadlocks_name_the_ops() -> None:
    profile = small_profile(3)
    decision = TensorDecision(place="host", stays=stays((0, 5)))
    plan = built(changed(resident(profile), 0, decision), profile)
    with pytest.raises(PlanError, match=r"op 1 \(forward 0\) waits for op 99, which the plan does not have"):
        simulate(with_op(plan, named(plan, "0 forward 0"), after=(99,)), profile)
    grad, update = named(plan, "5 offload grad 0"), named(plan, "5 update 0")
    ops = [op for op in plan.ops if op.id != grad.id]
    ops.insert(ops.index(update) + 1, grad)
    with pytest.raises(
        PlanError, match=r"deadlock: op \d+ \(update 0\) waits for op \d+ \(offload grad 0\).* after it"
    ):
        simulate(replace(plan, ops=tuple(ops)), profile)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ("keep",)}, "profile's model: options: 1 are given, the model has 3 blocks"),
        ({"options": ("keep", "offlaod", "keep")}, "profile's model: options: block .* does not offer 'offlaod'"),
        ({"timeline": ()}, "profile's model: timeline: it is not that of one batch through 3 blocks"),
        ({"groups": ()}, "cannot be simulated: tensor .* its weight is in none"),
    ],
)
def test_a_plan_that_contradicts_itself_is_named(fields: dict[str, Any], message: str) -> None:
    profile = small_profile(3)
    plan = built(resident(profile), profile)
    with pytest.raises(PlanError, match=message):
        simulate(replace(plan, **fields), profile)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 7}, r"there are 6 steps and 3 blocks"),
        ({"groups": (99,), "kind": "update", "lane": "compute"}, "the plan has"),
        ({"id": 2}, "the ids of the plan's ops are not their positions, 0 to"),
    ],
)
def test_an_op_that_names_what_is_not_there(fields: dict[str, Any], message: str) -> None:
    profile = small_profile(3)
    plan = built(resident(profile), profile)
    with pytest.raises(PlanError, match=message):
        simulate(with_op(plan, plan.ops[0], **fields), profile)
