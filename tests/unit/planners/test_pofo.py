"""POFO as a planner: its proposals become plans that are valid, fit and do what the sequences say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_offload.plan.assembly.just_in_time import Misfit
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions, Recomputation
from lt_offload.plan.iteration.memory import device_bytes
from lt_offload.plan.papers.pofo.chain import Operation, memory, sequential, walk
from lt_offload.plan.papers.pofo.convert import as_chain, as_decisions
from lt_offload.plan.papers.pofo.propose import propose_pofo
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request
from lt_offload.plan.planners.timed_plan import timed_plan
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import OptionProfile, Profile
from tests import sampling
from tests.support.profiles.by_hand import built
from tests.support.profiles.pofo_brute import from_scratch
from tests.support.profiles.small import HUGE, chained, small_profile

FIXED = 70
"""Context and shared bytes of the small profile."""
STATES = 3072
"""Arena bytes that one trainable weight takes with its states: 1000 bytes and 2000, each rounded up."""


def chained_profile(blocks: int = 8, *, link: float = 100.0, trainable: tuple[int, ...] = (), **kwargs: Any) -> Profile:
    """Blocks whose input is the output of the one before, and that offer every option; all frozen but ``trainable``.

    Saved 300 bytes, 10 of interface, 10 s forward and 20 s backward, as in ``small_profile``.
    """
    trainable = trainable or tuple(range(blocks))
    profile = small_profile(blocks, frozen=tuple(at for at in range(blocks) if at not in trainable), **kwargs)

    return chained(replace(profile, hardware=replace(profile.hardware, h2d_bytes_per_s=link, d2h_bytes_per_s=link)))


def request(profile: Profile, activations: int, **kwargs: Any) -> Request:
    """A budget that leaves ``activations`` bytes beside weights and states."""
    count = sum(tensor.trainable for tensor in profile.tensors)
    arena = count * STATES + (len(profile.tensors) - count) * 1024
    allowed = kwargs.pop("allowed", tuple(block.options for block in profile.blocks))
    return Request(
        profile=profile,
        budget_bytes=FIXED + arena + activations,
        host_budget_bytes=kwargs.pop("host_budget_bytes", HUGE),
        allowed=allowed,
        settings=Settings(**kwargs),
    )


def planned(proposal: Proposal, asked: Request) -> Plan:
    plan = built(proposal.decisions, asked.profile, budget=asked.budget_bytes)
    return replace(plan, host_budget_bytes=asked.host_budget_bytes)


def seconds(asked: Request) -> float:
    """The time of the best proposal; all are checked."""
    times = []
    for proposal in propose_pofo(asked):
        found = timed_plan(proposal.name, proposal.decisions, asked)
        assert not isinstance(found, Misfit)
        assert check(found.plan, asked.profile) == []
        assert device_bytes(found.plan, asked.profile).max() <= asked.budget_bytes
        times.append(found.trace.iteration_time)
    assert times == sorted(times)
    return times[0]


def options(decisions: Decisions) -> list[str]:
    return list(decisions.options)


@pytest.mark.parametrize("link", sampling.some([0.5, 2.0, 10.0, 100.0], 2))
def test_plans_are_valid_at_every_budget_and_faster_with_more(link: float) -> None:
    profile = chained_profile(link=link)
    computed = 8 * (10.0 + 20.0 + 1.0)  # with the update
    times = []
    for activations in range(1900, 4200, 300 if sampling.FULL else 700):
        times.append(seconds(request(profile, activations)))
        assert times[-1] >= computed - 1e-6
    assert all(before >= after - 1e-6 for before, after in zip(times, times[1:], strict=False))
    assert times[-1] == pytest.approx(computed)
    assert (times[0] > computed + 1) == (link < 100)  # the fastest link hides all its copies


def test_switches_are_respected() -> None:
    profile = chained_profile(link=10.0)
    mixed = seconds(request(profile, 2200))

    def only(*names: str) -> tuple[tuple[OptionProfile, ...], ...]:
        return tuple(tuple(o for o in block.options if o.name in names) for block in profile.blocks)

    for switch, names in (
        ("activation_offload", ("keep", "recompute", "discard")),
        ("recompute", ("keep", "offload")),
    ):
        asked = request(profile, 2200, allowed=only(*names), **{switch: False})
        for proposal in propose_pofo(asked):
            assert set(options(proposal.decisions)) <= set(names)
            assert switch != "recompute" or not proposal.decisions.recomputations
        assert seconds(asked) >= mixed - 1e-6


def test_host_memory_is_respected() -> None:
    profile = chained_profile(link=100.0)
    roomy = propose_pofo(request(profile, 2200))[0].decisions
    assert "offload" in options(roomy)
    ram = 8 * 3000
    asked = request(profile, 2200, host_budget_bytes=ram)
    assert not {"offload", "reload"} & set(options(propose_pofo(asked)[0].decisions))
    assert seconds(asked) > seconds(request(profile, 2200))


def test_what_does_not_apply_says_why() -> None:
    profile = chained_profile(3)
    stripped = tuple(tuple(o for o in block.options if o.name != "keep") for block in profile.blocks)
    for asked, message in (
        (replace(request(chained_profile(), 0), budget_bytes=FIXED + 20_000), "states take 24.6 kB of 20 kB; this"),
        (request(chained_profile(), 1100), "the rest is too little for the activations"),
        (request(profile, 3000, allowed=stripped), "block block0 cannot keep its activations"),
        (request(chained_profile(1), 3000), "no block between the first trainable parameter and the loss"),
    ):
        with pytest.raises(NotApplicable, match=message):
            propose_pofo(asked)


def test_the_chain_counts_what_the_plan_will() -> None:
    profile = chained_profile(8)
    asked = request(profile, 10_000)
    layout = as_chain(profile, asked.allowed)
    for operations in (sequential(layout.chain), from_scratch(layout.chain)):
        needed = max(memory(walk(operations, layout.chain)))
        decisions = as_decisions(operations, layout, profile, asked.allowed)
        plan = planned(Proposal(name="", sets=Sets(decisions, asked.profile)), asked)
        exact = int(device_bytes(plan, profile).max()) - plan.arena_bytes - FIXED
        assert exact <= needed <= exact + 40


def test_a_sequence_in_steps() -> None:
    """One of each: kept, offloaded, checkpointed here and on the host, discarded, and run again in several ways."""
    profile = chained_profile(7)
    asked = request(profile, 10_000)
    layout = as_chain(profile, asked.allowed)
    text = (
        "all 1, offload 2, checkpoint 2, none 3, none 4, offload 5, checkpoint 5, all 6, loss 7, prefetch 5, "
        "prefetch 2, backward 6, all 5, backward 5, checkpoint 2, none 3, all 4, backward 4, all 2, all 3, backward 3, "
        "backward 2, backward 1"
    )
    operations = [Operation(kind, int(layer)) for kind, layer in (part.split() for part in text.split(", "))]  # type: ignore[arg-type]
    decisions = as_decisions(operations, layout, profile, asked.allowed)
    assert options(decisions) == ["offload", "reload", "discard", "discard", "reload", "keep", "keep"]
    assert decisions.recomputations == {
        10: (
            Recomputation(block=1, save="input"),
            Recomputation(block=2, save="nothing"),
            Recomputation(block=3, save="all"),
        ),
        11: (Recomputation(block=1, save="all"), Recomputation(block=2, save="all")),
    }
    # What layer 2 reloads is needed two steps before its backward.
    assert decisions.usage(profile).fetched == {0: 13, 1: 10, 4: 9}
    assert check(planned(Proposal(name="", sets=Sets(decisions, asked.profile)), asked), profile) == []
