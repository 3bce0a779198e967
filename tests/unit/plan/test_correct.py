"""Profiles corrected by measured traces: exact where the simulator measures, robust where a run does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_offload.plan.correct import compare, correct, timed
from lt_offload.plan.iteration.decisions import TensorDecision
from lt_offload.plan.planners.baselines import smallest
from lt_offload.plan.solve import solve
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Span, Trace
from tests.support.profiles.by_hand import built
from tests.support.profiles.program_rules import KINDS, random_profile
from tests.support.profiles.small import READ, changed, named, resident, small_profile, stays, with_zero_copy


def scaled(
    profile: Profile,
    *,
    h2d: float = 1.0,
    d2h: float = 1.0,
    host: float = 1.0,
    device: float = 1.0,
    forward: Callable[[str], float] = lambda kind: 1.0,
    backward: Callable[[str], float] = lambda kind: 1.0,
) -> Profile:
    """Return ``profile`` with durations multiplied."""
    return replace(
        profile,
        blocks=tuple(
            replace(
                block,
                options=tuple(
                    replace(
                        option,
                        forward_s=option.forward_s * forward(block.kind),
                        backward_s=option.backward_s * backward(block.kind),
                    )
                    for option in block.options
                ),
            )
            for block in profile.blocks
        ),
        optimizer=replace(
            profile.optimizer,
            host_bytes_per_s=profile.optimizer.host_bytes_per_s / host,
            device_bytes_per_s=profile.optimizer.device_bytes_per_s / device,
        ),
        hardware=replace(
            profile.hardware,
            h2d_bytes_per_s=profile.hardware.h2d_bytes_per_s / h2d,
            d2h_bytes_per_s=profile.hardware.d2h_bytes_per_s / d2h,
        ),
    )


def speeds(profile: Profile) -> list[float]:
    return [
        profile.optimizer.host_bytes_per_s,
        profile.optimizer.device_bytes_per_s,
        profile.hardware.h2d_bytes_per_s,
        profile.hardware.d2h_bytes_per_s,
        *(s for block in profile.blocks for option in block.options for s in (option.forward_s, option.backward_s)),
    ]


def as_measured(trace: Trace, plan: Plan) -> Trace:
    """Return a simulated trace as an engine would record it: cut at the ends, updates inside their backward."""
    by_op = {span.op: span for span in trace.spans}
    first = min(span.start for span in trace.spans if span.lane == "compute")
    last = max(span.end for span in trace.spans if span.lane == "compute")
    spans = []
    for span, ago in [(span, ago) for span in trace.spans for ago in (-1, 0, 1)]:
        op = plan.ops[span.op]
        if op.lane == "compute" and op.kind not in ("forward", "backward"):
            continue
        if op.kind == "backward":
            inner = [o.id for o in plan.ops if o.step == op.step and o.lane == "compute" and o.id > op.id]
            span = replace(span, end=max([span.end, *(by_op[i].end for i in inner)]))
        span = replace(span, start=span.start + ago * trace.iteration_time, end=span.end + ago * trace.iteration_time)
        if span.end > first and span.start < last:
            spans.append(replace(span, start=max(span.start, first) - first, end=min(span.end, last) - first))
    return replace(trace, source="measured", iteration_time=last - first, spans=tuple(spans))


TRUE: dict[str, Any] = {
    "h2d": 1.7,
    "d2h": 0.6,
    "host": 2.5,
    "device": 1.4,
    "forward": {"embedding": 3.0, "layer": 1.2, "head": 0.7}.__getitem__,
    "backward": {"embedding": 0.5, "layer": 1.6, "head": 2.0}.__getitem__,
}


def cases() -> list[Any]:
    """Plans of several planners, between the least memory and enough."""
    return [
        pytest.param(seed, planner, share, id=f"{KINDS[seed % 5]}-{planner}-{share}")
        for seed, (planner, share) in enumerate(
            [("auto", 1.3), ("offmate", 1.3), ("offmate", 2.0), ("greedy", 3.0), ("l2l", 1.5), ("pofo", 4.0)]
        )
    ]


@functools.cache
def planned(seed: int, planner: Any, share: float) -> tuple[Profile, Plan]:
    profile = random_profile(np.random.default_rng(seed), KINDS[seed % 5])
    least = smallest(profile, [block.options for block in profile.blocks], host_update=True, host_budget=None)
    assert least is not None
    return profile, solve(profile, memory=int(share * least.device_bytes), planner=planner, solver_time_limit=1000)


# -- correction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "planner", "share"), cases())
def test_a_simulated_measurement_gives_back_the_speeds_it_was_made_with(seed: int, planner: str, share: float) -> None:
    profile, plan = planned(seed, planner, share)
    true = scaled(profile, **TRUE)
    measured = simulate(timed(plan, true), true)
    found = correct(profile, plan, [measured])
    lanes = {(op.lane, op.kind) for op in plan.ops if op.seconds > 0}
    pairs = {
        ("host", "update"): (found.optimizer.host_bytes_per_s, true.optimizer.host_bytes_per_s),
        ("compute", "update"): (found.optimizer.device_bytes_per_s, true.optimizer.device_bytes_per_s),
        ("h2d", "prefetch"): (found.hardware.h2d_bytes_per_s, true.hardware.h2d_bytes_per_s),
        ("d2h", "offload"): (found.hardware.d2h_bytes_per_s, true.hardware.d2h_bytes_per_s),
    }
    assert lanes & pairs.keys()
    for lane in lanes & pairs.keys():
        assert pairs[lane][0] == pytest.approx(pairs[lane][1]), lane
    for ours, theirs, name in zip(found.blocks, true.blocks, plan.options, strict=True):
        assert ours.option(name).forward_s == pytest.approx(theirs.option(name).forward_s)
        if ours.has_backward:
            assert ours.option(name).backward_s == pytest.approx(theirs.option(name).backward_s)
    after = timed(plan, found)
    assert after.predicted.iteration_s == pytest.approx(measured.iteration_time)
    assert compare(after, found, [measured]).agrees


@pytest.mark.parametrize(("seed", "planner", "share"), cases())
def test_a_trace_cut_as_an_engine_records_it_gives_the_right_prediction(seed: int, planner: str, share: float) -> None:
    profile, plan = planned(seed, planner, share)
    true = scaled(profile, **TRUE | {"device": 1.0})  # an update on the device is part of its backward
    exact = simulate(timed(plan, true), true)
    found = correct(profile, plan, [as_measured(exact, plan)])
    assert timed(plan, found).predicted.iteration_s == pytest.approx(exact.iteration_time, rel=0.05)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_same_speeds_give_the_same_times(accumulate: int) -> None:
    profile = random_profile(np.random.default_rng(5), KINDS[0])
    plan = solve(profile, memory=profile.hardware.device_bytes, accumulate=accumulate)
    again = timed(plan, profile).predicted
    assert (again.iteration_s, again.no_offload_s) == (plan.predicted.iteration_s, plan.predicted.no_offload_s)
    assert again.lower_bound_s > 0.5 * plan.predicted.lower_bound_s


def test_options_that_did_not_run_are_scaled_like_those_of_their_kind() -> None:
    profile = small_profile(4)
    plan = built(resident(profile), profile)
    true = scaled(profile, forward=lambda _: 1.5, backward=lambda _: 3.0)
    found = correct(profile, plan, [simulate(timed(plan, true), true)])
    assert speeds(found) == pytest.approx(speeds(true))


def test_what_was_not_measured_stays() -> None:
    profile = small_profile(4)
    plan = built(resident(profile), profile)
    true = scaled(profile, h2d=5.0, d2h=5.0, host=5.0)
    assert correct(profile, plan, [simulate(timed(plan, true), true)]) == profile


def test_direct_access_is_corrected_with_its_computation() -> None:
    profile = with_zero_copy(small_profile(4))
    decision = TensorDecision(place="host", zero_copy=(1, 6), grad_zero_copy=True)
    plan = built(changed(resident(profile), 1, decision), profile)
    true = with_zero_copy(profile, replace(READ, forward_s=8.0, backward_s=12.0))
    measured = simulate(timed(plan, true), true)
    found = correct(profile, plan, [measured])
    assert timed(plan, found).predicted.iteration_s == pytest.approx(measured.iteration_time, rel=0.02)
    assert found.tensors[1].read(1).forward_s > READ.forward_s
    assert found.tensors[0].zero_copy == profile.tensors[0].zero_copy, "was not read"


def test_one_disturbed_iteration_among_several_does_not_count() -> None:
    profile = small_profile(4)
    plan = built(resident(profile), profile)
    calm, busy = (scaled(profile, forward=lambda _, f=f: f, backward=lambda _, f=f: f) for f in (1.25, 9.0))
    traces = [simulate(timed(plan, true), true) for true in (calm, busy, calm)]
    assert speeds(correct(profile, plan, traces)) == pytest.approx(speeds(calm))
    assert compare(plan, profile, traces).measured_s == traces[0].iteration_time


# -- measured traces --------------------------------------------------------------------------------------------------


def measured(plan: Plan, spans: dict[str, tuple[float, float]], seconds: float) -> Trace:
    """Return a measured trace with ``spans`` by the words for their ops."""
    made = tuple(
        Span(op=named(plan, text).id, lane=named(plan, text).lane, label=text, start=start, end=end)
        for text, (start, end) in spans.items()
    )
    return Trace(
        source="measured", iteration_time=seconds, device_peak=0, host_peak=0, budget_bytes=0, spans=made, memory=()
    )


def host_plan(profile: Profile) -> Plan:
    """Block 1 is updated by the host: 5 s out, 10 s update, 10 s in; blocks take 10 and 20 s, updates there 1 s."""
    decision = TensorDecision(place="host", stays=stays((1, 4)))
    return built(changed(resident(profile), 1, decision), profile, lead=1, lag=1)


CALM = {
    "0 prefetch weight 1": (1.0, 11.0),
    "0 forward 0": (0.0, 10.0),
    "1 forward 1": (11.0, 21.0),
    "2 forward 2": (21.0, 31.0),
    "3 backward 2": (31.0, 52.0),
    "4 backward 1": (52.0, 72.0),
    "4 offload grad 1": (72.0, 77.0),
    "5 backward 0": (72.0, 93.0),
    "4 update 1": (77.0, 87.0),
}


def test_waiting_for_a_copy_is_no_work() -> None:
    profile = small_profile(3)
    plan = host_plan(profile)
    late = {text: (start + 4, end + 4) for text, (start, end) in CALM.items()}
    late["0 forward 0"], late["0 prefetch weight 1"] = CALM["0 forward 0"], (1.0, 15.0)
    late["1 forward 1"] = (10.0, 25.0)  # it waits within its span
    found = correct(profile, plan, [measured(plan, late, 97.0)])
    assert found.blocks[1].option("keep").forward_s == pytest.approx(10.0)
    assert found.hardware.h2d_bytes_per_s == pytest.approx(100.0 * 10 / 14)


def test_what_is_cut_at_an_end_of_the_iteration_is_not_measured() -> None:
    profile = small_profile(3)
    plan = host_plan(profile)
    cut = CALM | {"4 update 1": (87.0, 93.0), "0 prefetch weight 1": (0.0, 2.0)}
    found = correct(profile, plan, [measured(plan, cut, 93.0)])
    assert found.optimizer.host_bytes_per_s == profile.optimizer.host_bytes_per_s
    assert found.hardware.h2d_bytes_per_s == profile.hardware.h2d_bytes_per_s


# -- comparison -------------------------------------------------------------------------------------------------------


def test_a_comparison_names_the_lane_that_explains_most() -> None:
    profile = small_profile(3)
    plan = host_plan(profile)
    assert compare(plan, profile, [measured(plan, CALM, 93.0)]).agrees
    slow = scaled(profile, host=6.0)
    found = compare(plan, profile, [simulate(timed(plan, slow), slow)])
    assert not found.agrees
    assert not found.iteration_agrees
    assert "planned were 1" in found.sentence
    assert "'updates on host': 60" in found.sentence
    still = compare(plan, profile, [measured(plan, CALM, 200.0 - 1e-9)])
    assert not still.iteration_agrees


def test_a_lane_that_hardly_works_may_differ() -> None:
    profile = small_profile(3)
    plan = host_plan(profile)
    d2h = scaled(profile, d2h=1.5)
    assert compare(plan, profile, [simulate(timed(plan, d2h), d2h)]).agrees
    host = scaled(profile, host=1.5)
    trace = simulate(timed(plan, host), host)
    found = compare(plan, profile, [replace(trace, iteration_time=simulate(plan, profile).iteration_time)])
    assert found.iteration_agrees
    assert not found.agrees, "it works for more than a tenth of the iteration"


def test_waiting_that_no_lane_explains_is_called_so() -> None:
    profile = small_profile(3)
    plan = host_plan(profile)
    trace = simulate(plan, profile)
    found = compare(plan, profile, [replace(trace, iteration_time=2 * trace.iteration_time)])
    assert "the rest is waiting" in found.sentence
