"""The table for people: it fits, it says what matters, it needs no profile."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lt_offload.plan import explain, solve
from lt_offload.plan.iteration.decisions import Recomputation, TensorDecision
from lt_offload.schema.explain import OTHER_BITS, brief, headline
from lt_offload.schema.plan import Alternative, Plan, Prediction
from lt_offload.units import format_seconds
from tests.support.profiles.by_hand import built
from tests.support.profiles.fixtures import llama7b_b4
from tests.support.profiles.small import chained, changed, resident, small_profile, stays, with_options, with_zero_copy


def hand_made() -> Plan:
    profile = small_profile(5)
    decisions = changed(resident(profile), 1, TensorDecision(place="host", stays=stays((1, 8))))
    decisions = with_options(decisions, "keep", "keep", "keep", "recompute", "keep")
    plan = built(decisions, profile, budget=20_000, lead=1, lag=1)
    prediction = Prediction(
        iteration_s=200.0, lower_bound_s=160.0, no_offload_s=100.0, device_peak_bytes=19_000, host_peak_bytes=16_000
    )
    other = Alternative(planner="resident", iteration_s=None, reason="needs 3 kB more device memory")
    return replace(plan, predicted=prediction, alternatives=(other,), notes=("a thing to know",))


def test_a_bound_that_the_clock_cut_is_no_gap() -> None:
    plan = hand_made()
    plan = replace(plan, predicted=replace(plan.predicted, proved=False))
    text = " ".join(explain(plan).split())
    bound = format_seconds(plan.predicted.lower_bound_s)
    assert f"how near to the best is not proved, as time was up; computations alone take {bound}" in text
    assert "%" not in text.partition("device memory")[0]
    assert "(how near to the best is not proved)" in headline(plan)


def test_it_says_what_it_costs_and_why_it_was_chosen() -> None:
    text = " ".join(explain(hand_made()).split())
    assert "small, 5 blocks, batch 2 x 8 tokens, planner test" in text
    assert "2e+02 s" not in text
    assert "25.0% above the lower bound" in text
    assert "2.00 times the 100 s of a device with enough memory" in text
    assert "19 kB of 20 kB" in text
    assert "1 kB to the device, 1 kB to the host per iteration" in text
    assert "updates on host 5%" in text
    assert "no plan resident: needs 3 kB more device memory" in text
    assert "note a thing to know" in text
    assert "the backward runs the forward again" in text
    assert "paged" not in text, "only words that occur are explained"
    assert "estimated" not in text


def test_in_short_it_is_one_paragraph() -> None:
    lines = brief(hand_made()).splitlines()
    assert len(lines) <= 7
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert text.startswith("Plan: small, 5 blocks, batch 2 x 8 tokens, planner test. An iteration takes 3 min 20 s, ")
    assert "Device memory: 19 kB of 20 kB; RAM: 16 kB of" in text
    assert "Activations of 4 blocks stay on the device; of 1 block are computed again." in text
    assert "Tensors updated: 4 on the device, 1 on the host." in text


def test_it_names_what_updates_on_the_host() -> None:
    plan = replace(hand_made(), host_kernel=True)
    assert "1 on the host by the native AdamW." in " ".join(brief(plan).split())
    assert "which updates the weight there by the native AdamW" in " ".join(explain(plan).split())
    assert "native" not in brief(hand_made()) + explain(hand_made())


def test_in_short_it_says_that_gradients_have_other_last_bits() -> None:
    plan = replace(hand_made(), notes=("a thing to know", f"summed forward by forward, so that their {OTHER_BITS}"))
    assert OTHER_BITS in " ".join(brief(plan).split())
    assert OTHER_BITS not in " ".join(brief(hand_made()).split())


@pytest.mark.parametrize(("changes", "rate"), [({}, 0.08), ({"window": 4}, 0.32), ({"batch_size": 4}, 0.16)])
def test_tokens_per_second_are_those_of_an_update(changes: dict[str, int], rate: float) -> None:
    """16 tokens in 200 s; a window is one update of several micro-batches."""
    plan = replace(hand_made(), **changes)
    assert plan.tokens_per_s == pytest.approx(rate)
    for text in (brief(plan), explain(plan)):
        assert f"of a device with enough memory: {rate:.3g} tokens per second" in " ".join(text.split())


def test_the_rate_is_a_share_of_what_the_device_is_specified_for() -> None:
    """0.08 tokens per second in all, of two processes 0.16; without figures nothing is said."""
    plan = replace(hand_made(), flops_per_token=50.0, peak_flops_per_s=10.0)
    assert plan.peak_share == pytest.approx(0.4)
    assert replace(plan, processes=2).peak_share == pytest.approx(0.4)
    for text in (brief(plan), explain(plan)):
        assert "tokens per second, 40% of the rate that the device is specified for" in " ".join(text.split())
    for unknown in ({"flops_per_token": 0.0}, {"peak_flops_per_s": 0.0}, {"sequence_length": 1}):
        assert replace(plan, **unknown).peak_share is None
        assert "specified" not in brief(replace(plan, **unknown)) + explain(replace(plan, **unknown))


def test_plans_that_were_not_simulated_say_so_in_short() -> None:
    profile = small_profile(2)
    plan = built(resident(profile), profile)
    assert "An iteration takes not" not in brief(plan)
    assert "not simulated" in brief(plan)
    assert "not simulated" in explain(plan)


def test_estimates_are_called_so() -> None:
    text = " ".join(explain(replace(hand_made(), estimated=True)).split())
    assert "the profile was estimated, not measured" in text
    assert "iteration about" in text


@pytest.mark.parametrize("memory", ["40GB", "8GB"])
def test_it_fits_a_terminal_and_collapses_equal_blocks(memory: str) -> None:
    plan = solve(llama7b_b4(12), memory=memory, planner="greedy")
    text = plan.explain()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) < 60
    table = text.split("\n\n")[1].splitlines()
    assert len(table) - 2 < len(plan.options), "blocks that are treated alike share a line"
    assert "of weights are always on the device" in " ".join(text.split())


def test_a_notebook_shows_words() -> None:
    profile = small_profile(8)
    plan = solve(profile, memory=26_000, solver_time_limit=0.1)
    assert repr(plan) == f"<Plan for small: {headline(plan)}>"
    assert len(repr(profile)) < 200
    assert "8 blocks" in repr(profile)
    page = plan._repr_html_()
    assert len(page) < 10_000
    assert "An iteration takes" in page
    ElementTree.fromstring(f"<div>{page}</div>")


def test_the_table_says_what_runs_again_and_what_is_accessed_directly() -> None:
    profile = with_zero_copy(chained(small_profile(4)))
    first = TensorDecision(place="host", zero_copy=(0, 5, 6, 7), grad_zero_copy=True)
    decisions = changed(resident(profile), 0, first)
    decisions = with_options(decisions, "recompute", "discard", "discard", "keep")
    recomputations = {
        5: (
            Recomputation(block=0, save="input"),
            Recomputation(block=1, save="nothing"),
            Recomputation(block=2, save="all"),
        ),
        6: (Recomputation(block=0, save="input"), Recomputation(block=1, save="input")),
    }
    text = explain(built(replace(decisions, recomputations=recomputations), profile))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 recompute, again 2x direct 600 B - direct 1 kB host 1" in lines
    assert "1-2 discard, again 1-2x - - - device 1" in lines
    words = " ".join(text.split())
    assert "run again 5 forwards per iteration, 54 s" in words
    assert "; 600 B read directly; 1 kB written directly" in words
    for word in ("discard", "again", "direct"):
        assert any(line.startswith(f"{word} ") and len(line) > 40 for line in lines), word
    assert max(len(line) for line in text.splitlines()) <= 100
