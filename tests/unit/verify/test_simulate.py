"""The simulator: by hand, against a slow one, with an urgent host and with lanes that share the host's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_offload.errors import PlanError
from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Contention, Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import (
    all_on_the_host,
    chained,
    changed,
    named,
    resident,
    small_profile,
    stays,
    with_op,
    with_zero_copy,
)
from tests.unit.verify.slow_simulation import iteration_s


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


def test_deadlocks_name_the_ops() -> None:
    profile = small_profile(3)
    decision = TensorDecision(place="host", stays=stays((0, 5)))
    plan = built(changed(resident(profile), 0, decision), profile)
    with pytest.raises(PlanError, match=r"op 1 \(forward 0, step 0\): after: it waits for ops that do not exist"):
        simulate(with_op(plan, named(plan, "0 forward 0"), after=(99,)), profile)
    grad, update = named(plan, "5 offload grad 0"), named(plan, "5 update 0")
    ops = [op for op in plan.ops if op.id != grad.id]
    ops.insert(ops.index(update) + 1, grad)
    with pytest.raises(PlanError, match=rf"op {update.id} \(update 0, step 5\): ids: it stands at position {grad.id}"):
        simulate(replace(plan, ops=tuple(ops)), profile)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ("keep",)}, "profile's model: options: 1 are given, the model has 3 blocks"),
        ({"options": ("keep", "offlaod", "keep")}, "profile's model: options: block .* does not offer 'offlaod'"),
        ({"timeline": ()}, "profile's model: timeline: it is not that of one batch through 3 blocks"),
        ({"groups": ()}, "cannot be simulated: initial.0: group 0 at 0, there are 0 groups"),
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
        (
            {"groups": (99,), "kind": "update", "lane": "compute"},
            "names some that do not exist, the plan has",
        ),
        ({"id": 2}, "op 2 .*: ids: it stands at position 0"),
    ],
)
def test_an_op_that_names_what_is_not_there(fields: dict[str, Any], message: str) -> None:
    profile = small_profile(3)
    plan = built(resident(profile), profile)
    with pytest.raises(PlanError, match=message):
        simulate(with_op(plan, plan.ops[0], **fields), profile)


BLOCKS = 5


def planned(seconds: float) -> tuple[Plan, Profile]:
    """Every weight is fetched one step before its forward."""
    profile, decisions = all_on_the_host(BLOCKS, seconds)
    return built(decisions, profile, lead=1, lag=1), profile


def test_the_host_takes_the_update_that_is_needed_first() -> None:
    plan, profile = planned(45.0)
    assert check(plan, profile) == []
    spans = sorted(
        (span.start, plan.ops[span.op].block) for span in simulate(plan, profile).spans if span.lane == "host"
    )
    # Backwards take 20 s: while the host updates block 4, the gradients of 3 and 2 arrive. The first of all comes last.
    assert [block for _, block in spans] == [4, 2, 0, 1, 3]


def test_the_end_of_one_update_says_nothing_about_another() -> None:
    plan, profile = planned(1.0)
    updates = {op.block: op.id for op in plan.ops if op.kind == "update"}
    fetch = next(op for op in plan.ops if op.kind == "prefetch" and op.block == 3)
    # Block 2's gradient arrives later, so on a lane that kept the order its update would come after that of block 3.
    after = tuple(updates[2] if other == updates[3] else other for other in fetch.after)
    assert after != fetch.after
    found = check(with_op(plan, fetch, after=after), profile)
    assert any(f"op {fetch.id} " in line and f"op {updates[3]} " in line for line in found), found


def streamed(profile: Profile) -> Plan:
    options = ("offload",) * len(profile.blocks)
    return built(streaming_decisions(profile, options, host_update=True), profile, lead=1, lag=1)


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_slow_simulation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = small_profile(int(rng.integers(2, 6)), launch_s=float(rng.choice([0.0, 3.0])), tied=bool(seed % 3 == 0))
    profile = chained(with_zero_copy(profile))
    shares = [float(rng.choice([0.0, rng.uniform(0.1, 1)])) for _ in range(4)]
    contention = Contention(compute=shares[0], h2d=shares[1], d2h=shares[2], host=shares[3])
    speeds = {name: float(rng.uniform(20, 400)) for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
    profile = replace(
        profile,
        contention=contention,
        hardware=replace(profile.hardware, **speeds),
        optimizer=replace(profile.optimizer, host_bytes_per_s=float(rng.uniform(20, 400))),
    )
    plan = built(random_decisions(rng, profile), profile, lead=int(rng.integers(3)), lag=int(rng.integers(3)))
    assert simulate(plan, profile).iteration_time == pytest.approx(iteration_s(plan, profile), rel=1e-9)


def test_a_plan_takes_as_long_as_the_machine_of_the_profile_needs() -> None:
    slow, fast = small_profile(5), small_profile(5, speed=1e6)
    plan = streamed(slow)
    assert simulate(plan, fast).iteration_time == simulate(streamed(fast), fast).iteration_time
    assert simulate(plan, fast).iteration_time < simulate(plan, slow).iteration_time
