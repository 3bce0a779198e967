"""The net: two runs give the same bytes, passes are issued as planned, and a difference is found and said in words."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from lt_offload.plan.iteration.passes import shown_passes
from lt_offload.schema.plan import Op, Pass, Plan
from scripts.net import traces
from tests import sampling

LANES = ("compute", "h2d", "d2h", "host")


@cache
def plan_of(name: str) -> Plan:
    return traces.planned(traces.CASES[name])


def planned_calls(plan: Plan, which: Pass, lane: str) -> list[Op]:
    """What the plan says for a lane: updates on the device are called by gradients, not by the device's lane."""
    return [
        op
        for op in plan.program(which)
        if op.lane == lane and (lane != "compute" or op.kind in ("forward", "backward"))
    ]


@pytest.mark.parametrize("name", sampling.some(list(traces.CASES), 3))
def test_a_pass_asks_for_its_ops_in_the_order_of_the_plan(name: str) -> None:
    """Lane by lane. Only a sum that its window has not begun is not fetched."""
    plan = plan_of(name)
    seen = set()
    passes = [call for call in traces.traced(plan) if call.place.startswith(f"window {traces.WINDOWS - 1}")]
    for place in dict.fromkeys(call.place for call in passes):
        which = next((which for which in plan.passes if place.endswith(which)), None)
        if which is None:
            assert {call.op for call in passes if call.place == place} <= {-1}
            continue
        seen.add(which)
        for lane in LANES:
            found = [call.op for call in passes if call.place == place and call.kind == lane and call.op >= 0]
            expected = planned_calls(plan, which, lane)
            new = {op.id for op in expected if op.payload == "sum" and op.kind == "prefetch"} - {*found}
            assert found == [op.id for op in expected if op.id not in new]
            assert not new or plan.window > 1
    assert seen == {*shown_passes(plan)}


@pytest.mark.parametrize("name", sampling.some(list(traces.CASES), 1))
def test_two_runs_trace_the_same_calls(name: str) -> None:
    assert traces.text(traces.CASES[name]) == traces.text(traces.CASES[name])


@pytest.mark.slow
def test_the_cases_have_every_kind_of_pass_lane_option_and_place() -> None:
    found: Counter[str] = Counter()
    for plan in map(plan_of, traces.CASES):
        found.update({*plan.passes, *plan.options, *plan.update_places, *(op.lane for op in plan.ops)})
    assert found.keys() >= {"beginning", "accumulating", "updating", "settling", *LANES, "device", "paged", "host"}
    assert found.keys() >= {"keep", "recompute", "offload", "reload"}
