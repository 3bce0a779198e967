"""Weights that computations read in host memory and gradients that they write there; times with runs that repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lt_offload.plan.iteration.decisions import Decisions, Recomputation, TensorDecision
from lt_offload.plan.verify.check import check
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
