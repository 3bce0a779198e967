"""MemFerry's plans: they pass every check, fit, and use what they are allowed to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_offload.plan.assembly.just_in_time import Misfit
from lt_offload.plan.iteration.decisions import Decisions, TensorDecision, uses
from lt_offload.plan.papers.memferry.chain import Reading, chain, to_decisions
from lt_offload.plan.papers.memferry.propose import propose_memferry
from lt_offload.plan.papers.memferry.savings import Given, savings, with_savings
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.planners.embeddings import zero_copy_embeddings
from lt_offload.plan.planners.offmate.rounding import round_tensors
from lt_offload.plan.planners.request import NotApplicable, Request
from lt_offload.plan.planners.slots import share_slots
from lt_offload.plan.planners.timed_plan import timed_plan
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile, ReadProfile, TensorProfile, ZeroCopyProfile
from lt_offload.schema.trace import Trace
from tests import sampling
from tests.support.profiles.fixtures import llama7b_b4, with_bandwidth
from tests.support.profiles.random_solutions import random_solution
from tests.support.profiles.small import changed, small_profile, stays

ROWS = llama7b_b4(1).blocks[0].output_bytes
"""Bytes of an embedding that one batch reads."""


def with_zero_copy(profile: Profile, *, tiles: float = 16.0, of_tied: bool = True) -> Profile:
    """``profile`` with figures for direct host access: rows of embeddings, ``tiles`` times every matrix.

    ``of_tied``: whether tied tensors have some.
    """
    link = profile.hardware.h2d_bytes_per_s

    def read(tensor: TensorProfile, block: int) -> ReadProfile:
        embedding = profile.blocks[block].kind == "embedding"
        passes = 1.0 if len(tensor.shape) == 1 else tiles
        forward = min(ROWS, tensor.bytes) if embedding else int(passes * tensor.bytes)
        backward = 0 if embedding else forward
        seconds = {"forward_s": forward / link, "backward_s": backward / link}
        return ReadProfile(forward_bytes=forward, backward_bytes=backward, **seconds)

    tensors = []
    for tensor in profile.tensors:
        reads = tuple(read(tensor, block) for block in tensor.blocks)
        zero_copy = ZeroCopyProfile(reads=reads, grad_s=tensor.bytes / profile.hardware.d2h_bytes_per_s)
        tensors.append(replace(tensor, zero_copy=zero_copy if of_tied or len(tensor.blocks) == 1 else None))
    return replace(profile, tensors=tuple(tensors))


def fast_host(profile: Profile) -> Profile:
    """``profile`` with a host that does not hold up the iteration."""
    return replace(profile, optimizer=replace(profile.optimizer, host_bytes_per_s=20e9))


def mostly_frozen(*, tied: bool) -> Profile:
    """A profile of which the last tensor is trained only."""
    profile = with_zero_copy(llama7b_b4(6, tied=tied, trainable=False))
    last = profile.tensors[-1]
    trained = replace(last, trainable=True, state_bytes=2 * last.bytes)
    return replace(profile, tensors=(*profile.tensors[:-1], trained))


def request(profile: Profile, budget: float, **kwargs: Any) -> Request:
    defaults: dict[str, Any] = {
        "host_budget_bytes": 10**12,
        "allowed": tuple(block.options for block in profile.blocks),
    }
    defaults |= {name: kwargs.pop(name) for name in ("host_budget_bytes", "allowed") if name in kwargs}
    return Request(profile=profile, budget_bytes=int(budget), settings=Settings(**kwargs), **defaults)


def planned(decisions: Decisions, asked: Request) -> tuple[Plan, Trace]:
    """The plan of ``decisions`` as select makes it, checked, and its simulation."""
    found = timed_plan("memferry", decisions, asked)
    assert not isinstance(found, Misfit)
    plan, trace = share_slots(found.plan, asked.profile, found.trace)
    assert check(plan, asked.profile) == []
    return plan, trace


def proposals(asked: Request) -> dict[str, tuple[Decisions, Trace]]:
    """Proposals by name, each planned."""
    found = propose_memferry(asked)
    assert len({proposal.name for proposal in found}) == len(found)
    assert all(proposal.name.startswith("memferry, ") for proposal in found)
    return {proposal.name: (proposal.decisions, planned(proposal.decisions, asked)[1]) for proposal in found}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("budget", [40e9, 12e9, 7e9, 5e9], ids=lambda budget: f"{budget / 1e9:g} GB")
def test_plans_pass_every_check_and_fit(tied: bool, budget: float) -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(6, tied=tied)))
    found = proposals(request(profile, budget))
    best = min(trace.iteration_time for _, trace in found.values())
    compute = sum(o.forward_s + o.backward_s for o in (block.options[0] for block in profile.blocks))
    assert compute <= best <= 1.5 * compute
    for decisions, _ in found.values():
        assert all(decision.place == "host" for decision in decisions.tensors)


def test_the_embedding_is_read_directly_and_saves_its_copy() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4)))
    found = proposals(request(profile, 40e9))
    decisions, best = found["memferry, best forward"]
    assert decisions.tensors[0].zero_copy == (0, 11)
    assert decisions.tensors[0].stays == ()
    copied, slower = found["memferry, all weights copied"]
    assert not any(decision.zero_copy for decision in copied.tensors)
    less_s = (profile.tensors[0].bytes - ROWS) / profile.hardware.h2d_bytes_per_s
    # Its copy cannot begin before its update, which is the last.
    assert slower.iteration_time - best.iteration_time >= 0.99 * less_s


def test_a_tied_table_is_read_by_the_embedding_only() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(3, tied=True)))
    decision = proposals(request(profile, 40e9))["memferry, best forward"][0].tensors[0]
    assert decision.zero_copy == (0, 9)
    (interval,) = decision.stays
    assert 0 < interval.start <= interval.end == 5
    # Without figures it has to be copied before the first step and to stay to the last.
    profile = fast_host(with_zero_copy(llama7b_b4(3, tied=True), of_tied=False))
    decision = proposals(request(profile, 40e9))["memferry, best forward"][0].tensors[0]
    assert (decision.zero_copy, decision.stays) == ((), stays((0, 9)))


def test_matrices_that_are_cheap_to_read_are_read_and_copied_for_the_backward() -> None:
    """On a machine where most of a direct read hides behind arithmetic, and the link to the device is slow."""
    profile = fast_host(llama7b_b4(4))
    profile = replace(profile, hardware=replace(profile.hardware, h2d_bytes_per_s=2e9))
    profile = with_zero_copy(profile, tiles=0.6)
    found = proposals(request(profile, 40e9))
    decisions, best = found["memferry, best forward"]
    pairs = zip(profile.tensors, decisions.tensors, strict=True)
    switched = [c for tensor, c in pairs if len(c.zero_copy) == 1 and c.stays and len(tensor.shape) == 2]
    assert switched
    for decision in switched:
        (interval,) = decision.stays
        assert decision.zero_copy[0] < interval.start <= interval.end == 11 - decision.zero_copy[0]
    _, without = found["memferry, no copies after the forward"]
    _, copied = found["memferry, all weights copied"]
    assert best.iteration_time < without.iteration_time
    assert min(trace.iteration_time for _, trace in found.values()) < copied.iteration_time


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("reserve", [0.0, 0.3, 1.0])
def test_gradients_are_kept_within_the_reserve(reserve: float, tied: bool) -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4, tied=tied)))
    total = sum(tensor.bytes for tensor in profile.tensors)
    for decisions, _ in proposals(request(profile, 30e9, gradient_reserve=reserve)).values():
        pairs = list(zip(profile.tensors, decisions.tensors, strict=True))
        kept = sum(tensor.bytes for tensor, decision in pairs if not decision.grad_zero_copy)
        assert 0.95 * reserve * total <= kept <= reserve * total


@pytest.mark.slow
def test_more_reserve_and_a_faster_link_never_hurt() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4)))

    def fastest(asked: Request) -> float:
        return min(trace.iteration_time for _, trace in proposals(asked).values())

    times = [fastest(request(profile, 30e9, gradient_reserve=reserve)) for reserve in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    links = [
        fastest(request(with_zero_copy(fast_host(with_bandwidth(profile, speed))), 30e9)) for speed in (2, 5, 10, 50)
    ]
    assert links == sorted(links, reverse=True)


def test_gradients_are_written_directly_where_they_do_not_fit() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(6)))
    (roomy, _), (tight, _) = (proposals(request(profile, b))["memferry, best forward"] for b in (40e9, 4.1e9))
    assert not any(decision.grad_zero_copy for decision in roomy.tensors)
    assert any(decision.grad_zero_copy for decision in tight.tensors)


def test_frozen_weights_stay_until_memory_is_short() -> None:
    profile = mostly_frozen(tied=False)
    roomy = proposals(request(profile, 40e9))["memferry, best forward"][0]
    assert [c.place for c in roomy.tensors] == ["none"] * (len(profile.tensors) - 1) + ["host"]
    assert not any(c.stays or c.zero_copy for c in roomy.tensors[:-1])
    tight = proposals(request(profile, 5e9))["memferry, best forward"][0]
    assert any(c.stays or c.zero_copy for c in tight.tensors[:-1])


def test_a_frozen_tied_table_that_has_to_travel_is_read_by_the_embedding() -> None:
    profile = mostly_frozen(tied=True)
    found = proposals(request(profile, 4e9))
    decisions, best = found["memferry, best forward"]
    assert decisions.tensors[0].zero_copy == (0, 15)
    (interval,) = decisions.tensors[0].stays
    assert 0 < interval.start <= interval.end == 8
    copied, slower = found["memferry, all weights copied"]
    assert not any(decision.zero_copy for decision in copied.tensors)
    assert best.iteration_time < slower.iteration_time


@pytest.mark.slow
def test_switches_are_honoured() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(6)))
    for names in (("keep", "offload"), ("keep", "recompute")):
        allowed = tuple(tuple(o for o in block.options if o.name in names) for block in profile.blocks)
        for decisions, _ in proposals(request(profile, 8e9, allowed=allowed)).values():
            assert set(decisions.options) == set(names)


def test_activations_stay_off_the_host_if_ram_is_short() -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(6)))
    of_blocks = [sum(t.bytes for t in profile.tensors if block in t.blocks) for block in range(len(profile.blocks))]
    ram = sum(tensor.bytes + tensor.state_bytes for tensor in profile.tensors) + max(of_blocks)
    for decisions, _ in proposals(request(profile, 8e9, host_budget_bytes=ram)).values():
        assert set(decisions.options) == {"keep", "recompute"}
    with pytest.raises(NotApplicable, match=r"need .* GB of .* GB of RAM"):
        propose_memferry(request(profile, 8e9, host_budget_bytes=ram - 1))


def test_what_does_not_apply_says_why() -> None:
    profile = with_zero_copy(llama7b_b4(2))
    with pytest.raises(NotApplicable, match="host_update=False"):
        propose_memferry(request(profile, 40e9, host_update=False))
    with pytest.raises(NotApplicable, match="no figures for direct host access"):
        propose_memferry(request(llama7b_b4(2), 40e9))
    with pytest.raises(NotApplicable, match=r"its smallest plan needs 2\.\d+ GB of the 2 GB on the device"):
        propose_memferry(request(profile, 2e9))
    tied = with_zero_copy(llama7b_b4(2, tied=True), of_tied=False)
    with pytest.raises(NotApplicable, match=r"gradient_reserve=0.1, and the backward cannot write .*0\.\d+ or more"):
        propose_memferry(request(tied, 40e9, gradient_reserve=0.1))


def test_a_model_of_few_blocks_and_one_that_starts_frozen() -> None:
    for profile in (small_profile(1), small_profile(2), small_profile(4, frozen=(0, 1), no_backward=2)):
        asked = request(with_zero_copy(profile), 10**6)
        assert proposals(asked)


def test_the_chain_has_what_the_profile_says() -> None:
    profile = with_zero_copy(llama7b_b4(2, tied=True), tiles=3.0)
    readings = [Reading() for _ in profile.tensors]
    options = ("keep", "recompute", "keep", "keep")
    found = chain(profile, options, readings)
    assert [len(layer.weights) for layer in found.layers] == [1, 9, 9, 1]
    assert found.layers[0].weights[0].forward_s == float("inf")
    q, link = profile.tensors[found.tensors[1][0]], profile.hardware.h2d_bytes_per_s
    weight = found.layers[1].weights[0]
    assert weight.transfer_s == q.bytes / link
    assert weight.forward_s == weight.forward_read_s == pytest.approx(3 * q.bytes / link)
    # A backward that runs the forward again reads twice.
    assert weight.backward_s == pytest.approx(6 * q.bytes / link)
    assert found.layers[2].weights[0].backward_s == pytest.approx(3 * q.bytes / link)
    # Read directly by the embedding, the tied table is a weight of the head; its rows are time of the embedding.
    readings[0] = Reading(zero_copy=(0, 7))
    mixed = chain(profile, options, readings)
    assert [len(layer.weights) for layer in mixed.layers] == [0, 9, 9, 2]
    assert mixed.layers[0].forward_s == pytest.approx(found.layers[0].forward_s + ROWS / link)


def test_stays_cover_what_is_not_read_directly() -> None:
    profile = with_zero_copy(small_profile(4))
    readings = [Reading(), Reading(leaves=True), Reading(zero_copy=(2,)), Reading(zero_copy=(3, 4))]
    decisions = to_decisions(profile, ("keep",) * 4, readings, written=(1,))
    assert [c.stays for c in decisions.tensors] == [
        stays((0, 7)),
        stays((1, 1), (6, 6)),
        stays((5, 5)),
        (),
    ]
    assert [c.grad_zero_copy for c in decisions.tensors] == [False, True, False, False]
    planned(decisions, request(profile, 10**6))


def test_savings_are_sorted_and_shrink_what_they_change() -> None:
    profile = with_zero_copy(llama7b_b4(5))
    given = Given(
        options=tuple(block.options[0].name for block in profile.blocks),
        readings=tuple(Reading() for _ in profile.tensors),
    )
    allowed = tuple(block.options for block in profile.blocks)
    steps = savings(profile, given, allowed, link_price=1.0)
    assert [step.price for step in steps] == sorted(step.price for step in steps)
    after = with_savings(given, steps)
    assert all(reading.leaves or reading.zero_copy for reading in after.readings)
    assert all(option != "keep" for option in after.options[1:-1])


# -- embeddings of other plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_streaming_plans_may_read_their_embedding_directly(tied: bool) -> None:
    profile = fast_host(with_zero_copy(llama7b_b4(4, tied=tied)))
    asked = request(profile, 40e9)
    before = streaming_decisions(profile, ("keep",) * 6, host_update=True)
    after = zero_copy_embeddings(before, asked)
    assert after is not None
    assert after.tensors[0].zero_copy == (0, 11)
    assert after.tensors[1:] == before.tensors[1:]
    assert all(5 <= stay.start <= stay.end <= 6 for stay in after.tensors[0].stays)
    assert bool(after.tensors[0].stays) == tied
    (_, old), (plan, new) = planned(before, asked), planned(after, asked)
    assert new.iteration_time < old.iteration_time
    assert [op.zero_copy for op in plan.ops if op.kind == "forward" and op.block == 0] == [(0,)]
    assert zero_copy_embeddings(after, asked) is None


def test_a_table_that_stays_between_two_uses_is_shortened_only_where_nothing_needs_it() -> None:
    profile = with_zero_copy(llama7b_b4(4, tied=True))
    asked = request(profile, 40e9)
    before = streaming_decisions(profile, ("keep",) * 6, host_update=True)
    whole = changed(before, 0, replace(before.tensors[0], stays=stays((0, 11))))
    after = zero_copy_embeddings(whole, asked)
    assert after is not None
    assert after.tensors[0].stays == stays((5, 6))
    assert uses(profile.tensors[0].blocks, profile) == [0, 5, 6, 11]
    planned(after, asked)


def test_embeddings_updated_on_the_device_are_left_alone() -> None:
    profile = with_zero_copy(llama7b_b4(2))
    resident = Decisions(
        tensors=tuple(TensorDecision(place="device") for _ in profile.tensors),
        options=("keep",) * 4,
    )
    assert zero_copy_embeddings(resident, request(profile, 40e9)) is None
    without = llama7b_b4(2)
    streaming = streaming_decisions(without, ("keep",) * 4, host_update=True)
    assert zero_copy_embeddings(streaming, request(without, 40e9)) is None


def test_embeddings_of_arbitrary_plans() -> None:
    rng = np.random.default_rng(7)
    changes = 0
    for case in range(40):
        profile = with_zero_copy(llama7b_b4(int(rng.integers(1, 4)), tied=bool(rng.integers(2))))
        asked = request(profile, 10**12)
        before = round_tensors(random_solution(rng, profile), profile)
        after = zero_copy_embeddings(before, asked)
        on_host = before.tensors[0].place == "host"
        assert (after is not None) == on_host, case
        if after is not None:
            changes += 1
            planned(after, asked)
    assert 5 < changes < 35


@pytest.mark.slow
def test_arbitrary_small_models() -> None:
    """Weights of one size, arbitrary costs of direct access, some without, and budgets from hopeless to ample."""
    rng = np.random.default_rng(8)
    planned_ones, reasons = 0, []
    for _ in range(60 if sampling.FULL else 30):
        blocks = int(rng.integers(1, 7))
        frozen = tuple(int(block) for block in np.flatnonzero(rng.uniform(size=blocks) < rng.choice([0.0, 0.4])))
        tied = blocks > 1 and 0 not in frozen and blocks - 1 not in frozen and bool(rng.uniform() < 0.3)
        no_backward = 0 if tied else next((at for at in range(blocks) if at not in frozen), blocks)
        if no_backward == blocks or (tied and frozen):
            continue
        profile = small_profile(blocks, tied=tied, frozen=frozen, no_backward=int(no_backward), launch_s=0.1)
        profile = with_random_direct(rng, profile)
        asked = request(profile, rng.choice([2000, 3000, 4500, 7000, 20000]), gradient_reserve=rng.choice([None, 1.0]))
        try:
            found = propose_memferry(asked)
        except NotApplicable as reason:
            reasons.append(str(reason))
            continue
        for proposal in found:
            planned(proposal.decisions, asked)
        planned_ones += 1
    assert planned_ones > 12
    assert all(reason.startswith(("its smallest plan", "the profile has no figures")) for reason in reasons)


def random_read(rng: np.random.Generator) -> ReadProfile:
    forward, backward = (float(x) for x in rng.uniform(0, 20, 2))
    sizes = {"forward_bytes": int(100 * forward), "backward_bytes": int(100 * backward)}
    return ReadProfile(forward_s=forward, backward_s=backward, **sizes)


def with_random_direct(rng: np.random.Generator, profile: Profile) -> Profile:
    tensors = []
    for tensor in profile.tensors:
        reads = tuple(random_read(rng) for _ in tensor.blocks)
        zero_copy = ZeroCopyProfile(reads=reads, grad_s=float(rng.uniform(0, 20)))
        tensors.append(replace(tensor, zero_copy=zero_copy if rng.uniform() < 0.8 else None))
    blocks = tuple(
        replace(block, kind="embedding" if at == 0 else block.kind) for at, block in enumerate(profile.blocks)
    )
    return replace(profile, tensors=tuple(tensors), blocks=blocks)
