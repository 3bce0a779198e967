"""Forwards that run again: ops, dependencies, memory; random decisions with them and with direct access."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.iteration.decisions import Decisions, Recomputation, TensorDecision
from lt_offload.plan.iteration.memory import budget_for, computation_bytes, device_bytes, framework_bytes, usage
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan, Timeline
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile
from tests.support.profiles.by_hand import built, scheduled
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import (
    chained,
    changed,
    resident,
    small_profile,
    stays,
    waits_for,
    with_options,
    with_zero_copy,
    words,
)


def random_model(rng: np.random.Generator) -> Profile:
    blocks = int(rng.integers(2, 8))
    frozen = tuple(index for index in range(1, blocks) if rng.uniform() < 0.2)
    profile = small_profile(blocks, tied=bool(rng.integers(2)), states=int(rng.integers(3)))
    if rng.uniform() < 0.3:
        frozen, profile = (0,), small_profile(blocks, states=1, frozen=(0,), no_backward=1)
    elif not rng.integers(2):
        profile = small_profile(blocks, states=1, frozen=frozen)
    return with_zero_copy(chained(profile))


def with_again(profile: Profile, options: list[str], recomputations: dict[int, list[tuple[int, str]]]) -> Decisions:
    return replace(
        with_options(resident(profile), *options),
        recomputations={
            step: tuple(Recomputation(block=block, save=save) for block, save in chain)  # type: ignore[arg-type]
            for step, chain in recomputations.items()
        },
    )


PROFILE = chained(small_profile(4))
CHAINS = with_again(
    PROFILE,
    ["recompute", "discard", "discard", "keep"],
    {5: [(0, "input"), (1, "nothing"), (2, "all")], 6: [(0, "all"), (1, "input")]},
)


# -- ops -------------------------------------------------------------------------------------------------------------


def test_what_runs_again_stands_before_the_backward() -> None:
    plan = built(CHAINS, PROFILE)
    assert [words(op) for op in plan.ops if op.lane == "compute"] == [
        "0 forward 0",
        "1 forward 1",
        "2 forward 2",
        "3 forward 3",
        "4 backward 3",
        "4 update 3",
        "5 forward 0",
        "5 forward 1",
        "5 forward 2",
        "5 backward 2",
        "5 update 2",
        "6 forward 0",
        "6 forward 1",
        "6 backward 1",
        "6 update 1",
        "7 backward 0",
        "7 update 0",
    ]
    assert [op.save for op in plan.ops if op.save] == ["input", "nothing", "all", "all", "input"]
    assert check(plan, PROFILE) == []


def test_a_backward_lasts_as_long_as_what_it_finds_makes_it() -> None:
    plan = built(CHAINS, PROFILE)
    # Everything is saved of blocks 2 and 0, the input of block 1.
    assert [op.seconds for op in plan.ops if op.kind == "backward"] == [20, 20, 30, 20]
    assert {op.seconds for op in plan.ops if op.kind == "forward"} == {10}


def test_blocks_without_recompute_are_described_by_keep() -> None:
    blocks = tuple(
        replace(block, options=tuple(o for o in block.options if o.name != "recompute")) for block in PROFILE.blocks
    )
    profile = replace(PROFILE, blocks=blocks)
    decisions = with_again(profile, ["keep", "reload", "discard", "keep"], {5: [(1, "input"), (2, "input")]})
    plan = built(decisions, profile)
    assert check(plan, profile) == []
    assert [op.seconds for op in plan.ops if op.kind == "backward"] == [20, 30, 30, 20]
    assert computation_bytes(plan, profile).tolist() == computation_bytes(built(decisions, PROFILE), PROFILE).tolist()


def test_what_runs_again_waits_for_its_weights_and_for_its_input() -> None:
    decisions = with_again(PROFILE, ["keep", "reload", "discard", "keep"], {5: [(1, "input"), (2, "all")]})
    decisions = changed(decisions, 1, TensorDecision(place="host", stays=stays((1, 1), (5, 6))))
    decisions = changed(decisions, 2, TensorDecision(place="device", stays=stays((2, 2), (5, 5)), write_back=5))
    plan = built(decisions, PROFILE, lead=1)
    assert check(plan, PROFILE) == []
    assert waits_for(plan, "5 forward 1") == {"4 prefetch activation 1", "4 prefetch weight 1"}
    assert waits_for(plan, "5 forward 2") == {"4 prefetch weight 2"}
    assert "4 prefetch weight 1" in waits_for(plan, "6 backward 1")


def test_what_runs_again_takes_over_memory_that_was_given_back() -> None:
    decisions = with_again(PROFILE, ["recompute", "recompute", "keep", "keep"], {5: [(1, "all")]})
    decisions = changed(decisions, 3, TensorDecision(place="host", stays=stays((3, 4))))
    plan = built(decisions, PROFILE, lead=1)
    assert waits_for(plan, "5 forward 1") == {"4 offload grad 3"}
    assert check(plan, PROFILE) == []


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_each_computation() -> None:
    plan = built(CHAINS, PROFILE)
    fixed = plan.arena_bytes + 50 + 20
    # Interfaces have 10 bytes, a graph 300; working memory is 5 or 7 beside a graph, 305 or 307 with one that is not
    # kept; gradients have 1000.
    expected = [
        10 + 305,  # forward 0
        10 + 10 + 305,
        10 + 10 + 305,
        300 + 10 + 5,  # forward 3 has no output
        300 + 2 * 10 + 7 + 1000,  # backward 3: input, its gradient
        # The gradient of block 2's output waits; the input of block 0 has no bytes.
        10 + 10 + 305,  # block 0 again
        10 + (10 + 10) + 305,  # block 1 again: what block 0 has returned, what it returns
        10 + (10 + 10) + 300 + 5,  # block 2 again, saving all
        300 + (2 * 10 + 10) + 7 + 1000,  # backward 2
        10 + 10 + 300 + 5,  # block 0 again, saving all
        10 + 300 + (10 + 10) + 305,  # block 1 again
        300 + (2 * 10 + 10) + 307 + 1000,  # backward 1
        300 + 10 + 7 + 1000,  # backward 0
    ]
    assert computation_bytes(plan, PROFILE).tolist() == [fixed + size for size in expected]
    steps = [*expected[:5], max(expected[5:9]), max(expected[9:12]), expected[12]]
    assert device_bytes(plan, PROFILE).tolist() == [fixed + size for size in steps]
    assert [size for _, size in simulate(plan, PROFILE).memory] == [fixed + size for size in expected]


def test_a_saved_input_is_held_until_it_is_dropped() -> None:
    kept = with_again(PROFILE, ["recompute", "recompute", "discard", "recompute"], {5: [(1, "input"), (2, "all")]})
    dropped = replace(
        kept,
        recomputations={
            5: (Recomputation(block=1, save="nothing"), *kept.recomputations[5][1:]),
            6: CHAINS.recomputations[6],
        },
    )
    sizes = [computation_bytes(built(decisions, PROFILE), PROFILE) for decisions in (kept, dropped)]
    # forwards, backward 3, blocks 1 and 2 again, backward 2
    assert (sizes[0][:8] - sizes[1][:8]).tolist() == [0] * 6 + [10, 10]
    assert check(built(dropped, PROFILE), PROFILE) == []


def test_reloaded_inputs_count_from_their_return() -> None:
    options = ["recompute", "reload", "discard", "keep"]
    chain = with_again(PROFILE, options, {5: [(1, "input"), (2, "all")]})
    found = []
    for times in ((1, 5), (2, 4)):
        plan = built(chain, PROFILE, activations={1: times})
        assert check(plan, PROFILE) == []
        found.append(device_bytes(plan, PROFILE))
        assert simulate(plan, PROFILE).host_peak == 4 * 3000 + 10
    assert (found[1] - found[0]).tolist() == [0, 0, 10, 0, 10, 0, 0, 0]


def reference(plan: Plan, profile: Profile) -> list[int]:
    """Count what is allocated while each computation runs, by walking through the ops."""
    held: dict[tuple[str, int], int] = {}
    leaves: dict[int, list[tuple[str, int]]] = {}
    found, step, again = [], 0, {}
    for op in plan.ops:
        while step < op.step:
            for name in leaves.pop(step, ()):
                del held[name]
            step += 1
        block = profile.blocks[op.block]
        option = block.option(plan.options[op.block])
        if op.kind == "prefetch" and op.payload == "activation":
            held["fetched", op.block] = option.offload_bytes
        if op.kind == "offload" and op.payload == "activation":
            held["leaving", op.block] = option.offload_bytes
            leaves.setdefault(op.release_after or 0, []).append(("leaving", op.block))
        if op.kind == "offload" and op.payload == "grad" and op.lane == "d2h":
            for t in plan.tensors(op):
                held["grad", t] = profile.tensors[t].bytes
                leaves.setdefault(op.release_after or 0, []).append(("grad", t))
        if op.kind == "forward" and op.save is None:
            held_now = sum(held.values()) + block.input_bytes + block.output_bytes
            held_now += option.saved_bytes if block.has_backward else 0
            peak = option.forward_peak_bytes
            if option.before_loss_bytes is not None and op.block == len(profile.blocks) - 1:
                going = sum(held[name] for name in leaves.get(op.step, ()) if name[0] == "leaving")
                peak = max(option.before_loss_bytes, peak - going)
            found.append(held_now + peak)
            if block.has_backward:
                held["saved", op.block] = option.saved_bytes
                held["input", op.block] = block.input_bytes if option.keeps_input else 0
        elif op.kind == "forward":
            current = profile.blocks[plan.timeline[op.step].block]
            cost = block.option("keep" if op.save == "all" else "recompute")
            own = held.pop(("input", op.block), 0) + held.pop(("fetched", op.block), 0) or block.input_bytes
            own += held.pop(("saved", op.block), 0) + (cost.saved_bytes if op.save == "all" else 0)
            delta = current.output_bytes if current.has_backward else 0
            found.append(sum(held.values()) + own + block.output_bytes + cost.forward_peak_bytes + delta)
            if op.save != "nothing":
                held["input", op.block] = block.input_bytes
            if op.save == "all":
                held["saved", op.block] = cost.saved_bytes
            again[op.block] = op.save
        elif op.kind == "backward":
            held.pop(("input", op.block), None)
            held.pop(("fetched", op.block), None)
            total = sum(held.values())
            if block.has_backward:
                name = {"all": "keep", "input": "recompute"}.get(again.get(op.block, ""), option.name)
                total += 2 * block.input_bytes + block.output_bytes
                total += in_backward(plan, profile, op.step, held, block.option(name))
            found.append(total)
            held.pop(("saved", op.block), None)
    return found


def in_backward(
    plan: Plan, profile: Profile, step: int, held: dict[tuple[str, int], int], option: OptionProfile
) -> int:
    """Return what comes with a backward; sums of tied tensors are held from their first one to their last."""
    staying = passing = gone = 0
    gathered: list[int] = []
    copied = {t for op in plan.ops if op.payload == "grad" and op.lane == "d2h" for t in plan.tensors(op)}
    written = {t for op in plan.ops if op.writes_gradients for t in plan.tensors(op)}
    for t, tensor in enumerate(profile.tensors):
        steps = sorted(
            Timeline(plan.timeline).backward(block) for block in tensor.blocks if profile.blocks[block].has_backward
        )
        if not tensor.trainable or step not in steps:
            continue
        if step == steps[0]:
            staying += tensor.bytes
            gone += tensor.bytes if len(steps) == 1 and t in written else 0
        else:
            passing = max(passing, tensor.bytes)
        if step == steps[-1] and t in copied:
            gathered.append(tensor.bytes)
        if len(steps) > 1 and step == steps[0]:
            held["sum", t] = tensor.bytes
        elif len(steps) > 1 and step == steps[-1]:
            del held["sum", t]
    middle = option.backward_peak_bytes + staying + passing
    if option.held_peak_bytes is not None:
        middle = min(middle, option.held_peak_bytes)
    if option.passing_peak_bytes is not None:
        middle = min(middle, option.passing_peak_bytes + staying - gone)
    last = step == len(profile.blocks)
    copies = sum(gathered) if len(gathered) > 1 else 0
    return max(middle, staying - gone + copies - (0 if last else option.saved_bytes))


def with_held_peaks(profile: Profile, rng: np.random.Generator) -> Profile:
    """Return ``profile`` with gradients that come while activations go, and with a loss behind the last block."""

    def known(block: BlockProfile) -> BlockProfile:
        held, passing = map(int, rng.integers(0, 300, size=2))
        peaks = [option.backward_peak_bytes for option in block.options]
        pairs = zip(block.options, peaks, strict=True)
        options = [replace(o, held_peak_bytes=p + held, passing_peak_bytes=p + passing) for o, p in pairs]
        return replace(block, options=tuple(options))

    def with_loss(option: OptionProfile) -> OptionProfile:
        before = option.forward_peak_bytes
        return replace(option, forward_peak_bytes=before + int(rng.integers(0, 300)), before_loss_bytes=before)

    blocks = list(map(known, profile.blocks))
    blocks[-1] = replace(blocks[-1], options=tuple(map(with_loss, blocks[-1].options)))
    return replace(profile, blocks=tuple(blocks))


@pytest.mark.parametrize("seed", range(60))
def test_random_choices_are_valid_and_counted_to_the_byte(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_model(rng)
    profile = with_held_peaks(profile, rng) if seed % 2 else profile
    decisions = random_decisions(rng, profile)
    at_once = framework_bytes(decisions.usage(profile), profile)
    assert (at_once == framework_bytes(usage(built(decisions, profile)), profile)).all()
    plan = built(decisions, profile, lead=int(rng.integers(3)), lag=int(rng.integers(3)))
    assert check(plan, profile) == []
    counted = computation_bytes(plan, profile) - plan.arena_bytes - budget_for(0, profile)
    assert counted.tolist() == reference(plan, profile)
    trace = simulate(plan, profile)
    assert check(replace(plan, budget_bytes=trace.device_peak), profile) == []
    (violation,) = check(replace(plan, budget_bytes=trace.device_peak - 1), profile)
    assert "1 bytes too many" in violation
    for lane in ("compute", "h2d", "d2h", "host"):
        assert trace.iteration_time >= sum(op.seconds for op in plan.ops if op.lane == lane) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(60, 90))
def test_random_choices_are_scheduled_where_they_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_model(rng)
    decisions = random_decisions(rng, profile)
    for share in (1.0, rng.uniform(1.0, 1.5)):
        plan = scheduled(decisions, profile, share=share)
        assert check(plan, profile) == []
        assert plan.options == decisions.options
        assert plan.update_places == tuple(decision.place for decision in decisions.tensors)
        assert usage(plan).recomputations == decisions.recomputations
        assert usage(plan).grad_zero_copy == decisions.usage(profile).grad_zero_copy
