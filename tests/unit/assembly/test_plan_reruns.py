"""Forwards that run again: ops, dependencies, memory; random decisions with them and with direct access."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lt_offload.plan.iteration.memory import budget_for, computation_bytes, framework_bytes, usage
from lt_offload.plan.verify.check import check
from lt_offload.plan.verify.simulate import simulate
from lt_offload.schema.plan import Plan, Timeline
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile
from tests.support.profiles.by_hand import built, scheduled
from tests.support.profiles.random_decisions import random_decisions
from tests.support.profiles.small import (
    chained,
    small_profile,
    with_zero_copy,
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


# -- memory ----------------------------------------------------------------------------------------------------------


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
