"""Weights that computations read in host memory and gradients that they write there; times with runs that repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_offload.plan.iteration.decisions import Decisions, Recomputation, TensorDecision
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.explain import explain
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles import by_hand
from tests.support.profiles.small import (
    READ,
    chained,
    changed,
    named,
    resident,
    small_profile,
    stays,
    waits_for,
    with_options,
    with_zero_copy,
)

PROFILE = with_zero_copy(chained(small_profile(4)))
FIRST = TensorDecision(place="host", zero_copy=(0, 7), grad_zero_copy=True)
"""The first block's weight is never on the device."""


def built(decisions: Decisions, profile: Profile = PROFILE, **times: Any) -> Plan:
    plan = by_hand.built(decisions, profile, **times)
    assert check(plan, profile) == []
    return plan


def spans(plan: Plan, profile: Profile = PROFILE) -> dict[str, tuple[float, float]]:
    """Times since the start of the first forward."""
    trace = simulate(plan, profile)
    origin = next(span.start for span in trace.spans if span.label.startswith("forward 0"))
    return {span.label: (span.start - origin, span.end - origin) for span in trace.spans}


# -- ops and memory --------------------------------------------------------------------------------------------------


def test_a_tied_weight_costs_what_the_block_that_reads_it_needs() -> None:
    lookup, product = replace(READ, backward_s=0.0, backward_bytes=0), replace(READ, forward_s=7.0, forward_bytes=700)
    profile = with_zero_copy(chained(small_profile(4, tied=True)), lookup, product)
    everything = TensorDecision(place="host", zero_copy=(0, 3, 4, 7))
    plan = built(changed(resident(profile), 0, everything), profile)
    read = [(op.block, op.bytes, op.seconds) for op in plan.ops if op.zero_copy]
    assert read == [(0, 100, 12), (3, 700, 17), (3, 200, 23), (0, 0, 20)]
    embedding = replace(everything, zero_copy=(0, 7), stays=stays((3, 4)))
    plan = built(changed(resident(profile), 0, embedding), profile, lead=1)
    assert [(op.block, op.bytes) for op in plan.ops if op.zero_copy] == [(0, 100), (0, 0)]
    assert "2 prefetch weight 3" in waits_for(plan, "3 forward 3")
    # A backward that runs the forward again reads twice.
    plan = built(changed(resident(profile, "recompute"), 0, everything), profile)
    assert named(plan, "4 backward 3").bytes == 700 + 200


def test_written_back_weights_may_be_read_directly_afterwards() -> None:
    decision = TensorDecision(place="device", zero_copy=(1,), stays=stays((6, 6)), write_back=6)
    plan = built(changed(resident(PROFILE), 1, decision))
    assert waits_for(plan, "1 forward 1") == {"-6 offload weight 1"}
    unwritten = by_hand.built(changed(resident(PROFILE), 1, replace(decision, write_back=None)), PROFILE)
    (violation, *_) = check(unwritten, PROFILE)
    assert "would be lost" in violation or "outdated" in violation


# -- times -----------------------------------------------------------------------------------------------------------


def test_times_of_direct_access() -> None:
    # Forward: 10 + 2 s. Backward: 20 + 3 s and 1 s of writing, hidden behind it. The update of 10 s is awaited.
    found = spans(built(changed(resident(PROFILE), 0, FIRST)))
    assert found["forward 0, direct"] == (0, 12)
    assert found["backward 0, direct"] == (12 + 30 + 60 + 3, 12 + 30 + 60 + 3 + 23)
    assert found["offload grad 0, direct"] == (128, 129)
    assert simulate(built(changed(resident(PROFILE), 0, FIRST)), PROFILE).iteration_time == pytest.approx(139)


def test_a_computation_lasts_as_long_as_the_link_needs() -> None:
    slow = replace(PROFILE, hardware=replace(PROFILE.hardware, h2d_bytes_per_s=5.0, d2h_bytes_per_s=10.0))
    found = spans(built(changed(resident(slow), 0, FIRST), slow), slow)
    assert found["forward 0, direct"] == (0, 20)
    begin, end = found["backward 0, direct"]
    assert end - begin == 40, "200 bytes at 5 per second"
    # 1000 bytes of gradients at 10 per second, from the begin of the backward on
    assert found["offload grad 0, direct"] == (end, begin + 100)


def test_direct_reads_delay_copies() -> None:
    # Block 3 is fetched anew from the begin of backward 2 on, which takes 20 s; reading for that backward takes 6 s.
    decisions = changed(resident(PROFILE), 3, TensorDecision(place="none", stays=stays((3, 4))))
    more = with_zero_copy(PROFILE, replace(READ, backward_bytes=600)).tensors
    frozen = replace(more[3], trainable=False, state_bytes=0, bytes=2000)
    profile = replace(PROFILE, tensors=(*more[:3], frozen))
    read = changed(decisions, 2, TensorDecision(place="host", zero_copy=(2, 5), grad_zero_copy=True))
    for decided, seconds in ((decisions, 20), (read, 26)):
        plan = built(decided, profile, arrivals={3: (1,)})
        found, iteration = spans(plan, profile), simulate(plan, profile).iteration_time
        begin = next(start for name, (start, _) in found.items() if name.startswith("backward 2"))
        assert found["prefetch weight 3"][1] == pytest.approx(begin + seconds - iteration)


def test_more_bandwidth_never_hurts_direct_access() -> None:
    times = []
    for speed in (0.1, 1.0, 10.0):
        profile = with_zero_copy(small_profile(6, speed=speed))
        decisions = streaming_decisions(profile, ("offload",) * 6, host_update=True)
        decisions = changed(decisions, 2, TensorDecision(place="host", zero_copy=(2, 9), grad_zero_copy=True))
        times.append(simulate(built(decisions, profile, lead=1, lag=1), profile).iteration_time)
    assert times == sorted(times, reverse=True)


# -- text, and who may not choose ------------------------------------------------------------------------------------


def test_the_table_says_what_runs_again_and_what_is_accessed_directly() -> None:
    decisions = changed(resident(PROFILE), 0, FIRST)
    decisions = with_options(decisions, "recompute", "discard", "discard", "keep")
    recomputations = {
        5: (
            Recomputation(block=0, save="input"),
            Recomputation(block=1, save="nothing"),
            Recomputation(block=2, save="all"),
        ),
        6: (Recomputation(block=0, save="input"), Recomputation(block=1, save="input")),
    }
    decisions = changed(decisions, 0, replace(FIRST, zero_copy=(0, 5, 6, 7)))
    text = explain(built(replace(decisions, recomputations=recomputations)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 recompute, again 2x direct 600 B - direct 1 kB host 1" in lines
    assert "1-2 discard, again 1-2x - - - device 1" in lines
    words = " ".join(text.split())
    assert "run again 5 forwards per iteration, 54 s" in words
    assert "; 600 B read directly; 1 kB written directly" in words
    for word in ("discard", "again", "direct"):
        assert any(line.startswith(f"{word} ") and len(line) > 40 for line in lines), word
    assert max(len(line) for line in text.splitlines()) <= 100
