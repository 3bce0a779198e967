"""POFO: its program against enumeration and another program, and plans of its sequences."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from lt_offload.plan.assembly.just_in_time import Missed
from lt_offload.plan.assembly.sets import Sets
from lt_offload.plan.iteration.decisions import Decisions, Recomputation
from lt_offload.plan.iteration.memory import device_bytes
from lt_offload.plan.papers.pofo.chain import Chain, Operation, kept_bytes, sequential
from lt_offload.plan.papers.pofo.convert import as_chain, as_decisions
from lt_offload.plan.papers.pofo.program import ChainProgram
from lt_offload.plan.papers.pofo.propose import propose_pofo
from lt_offload.plan.planners.request import NotApplicable, Proposal, Request
from lt_offload.plan.settings import Settings
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import OptionProfile, Profile
from tests import sampling
from tests.support.profiles.by_hand import built, timed_plan
from tests.support.profiles.pofo_brute import fluid_s, from_scratch, random_chain, rematerialised_s, sequences
from tests.support.profiles.pofo_walk import memory, walk
from tests.support.profiles.small import HUGE, chained, small_profile


def bounds(chain: Chain) -> tuple[int, int]:
    """The memory to begin every backward from the input, and to keep everything."""
    low, high = (max(memory(walk(made(chain), chain))) for made in (from_scratch, sequential))
    assert high == kept_bytes(chain)
    return low, high


def exact(chain: Chain, memory_bytes: int, **switches: bool) -> ChainProgram:
    """A program whose slots are bytes."""
    return ChainProgram(chain, memory_bytes=memory_bytes, slots=memory_bytes, **switches)


@pytest.mark.parametrize("rate", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(8))
def test_equals_enumeration_with_three_layers(seed: int, rate: float) -> None:
    chain = random_chain(seed, 3, rate=rate)
    low, high = bounds(chain)
    everything = list(sequences(chain))
    for budget in sorted({low - 2, low, (2 * low + high) // 3, (low + high) // 2, high - 1, high}):
        best = min(fluid_s(operations, chain, budget) for operations in everything)
        assert exact(chain, budget).seconds(budget) == pytest.approx(best, rel=1e-4)


def test_mixing_beats_both_ingredients() -> None:
    """Otherwise the comparisons above would prove little."""
    wins = 0
    for seed in range(10):
        chain = random_chain(seed, 5)
        low, high = bounds(chain)
        budget = (low + high) // 2
        mixed, again, travel = (
            exact(chain, budget, offload=offload, recompute=recompute).seconds(budget)
            for offload, recompute in ((True, True), (False, True), (True, False))
        )
        assert mixed <= min(again, travel)
        wins += mixed < min(again, travel)
    assert wins >= 3


@pytest.mark.parametrize("seed", range(6))
def test_without_a_link_equals_an_independent_program(seed: int) -> None:
    chain = random_chain(seed, 7)
    low, high = bounds(chain)
    for budget in range(low - 2, high + 1, 2):
        expected = rematerialised_s(chain, budget)
        assert exact(chain, budget, offload=False).seconds(budget) == pytest.approx(expected)
        assert exact(replace(chain, bytes_per_s=0.0), budget).seconds(budget) == pytest.approx(expected)


@pytest.mark.parametrize("seed", sampling.some(range(6), 3))
def test_a_sequence_takes_the_time_and_memory_it_was_chosen_for(seed: int) -> None:
    chain = random_chain(seed, 9)
    low, high = bounds(chain)
    program = exact(chain, high)
    for budget in range(low, high + 1, 3):
        operations = program.sequence(budget)
        assert max(memory(walk(operations, chain))) <= budget
        assert fluid_s(operations, chain, budget) == pytest.approx(program.seconds(budget), rel=1e-4)


@pytest.mark.parametrize("seed", sampling.some(range(4), 2))
def test_more_memory_or_a_faster_link_never_hurts(seed: int) -> None:
    chain = random_chain(seed, 8)
    low, high = bounds(chain)
    program = exact(chain, high)
    times = [program.seconds(budget) for budget in range(low, high + 1)]
    assert times == sorted(times, reverse=True)
    budget = (low + high) // 2
    speeds = [
        exact(replace(chain, bytes_per_s=rate), budget).seconds(budget) for rate in (0.0, 1.0, 2.0, 4.0, 8.0, 64.0)
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1]


def test_too_little_memory_has_no_sequence() -> None:
    chain = random_chain(1, 4)
    program = exact(chain, 50)
    assert program.seconds(1) == inf
    assert program.seconds(-1) == inf
    with pytest.raises(ValueError, match="no sequence needs as little as 1 bytes"):
        program.sequence(1)


def test_a_program_is_solved_without_a_compiler() -> None:
    code = (
        "import sys\n"
        "from lt_offload.plan.papers.pofo.program import ChainProgram\n"
        "from tests.support.profiles.pofo_brute import random_chain\n"
        "assert ChainProgram(random_chain(1, 3), memory_bytes=50, slots=50).seconds(50) > 0\n"
        "assert not {'numba', 'torch'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
        assert not isinstance(found, Missed)
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
