"""The batch size: profiles at other sizes, relaxed programs for several, and the choice by simulation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from lt_offload.errors import ConfigError, InfeasibleError, UnsupportedError
from lt_offload.plan import Choices, Settings, choose_batch, make_plan, solve
from lt_offload.plan.batch.profiles import in_parts, scaled
from lt_offload.plan.batch.splits import Split
from lt_offload.plan.planners.offmate.config import OffmateConfig
from lt_offload.plan.planners.offmate.program import lower_bound
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.papers.offmate_program import PAPER, PaperProgram
from tests.support.profiles.fixtures import GB, llama7b_b4
from tests.support.profiles.small import small_profile

CONFIG = OffmateConfig(budget_bytes=int(10 * GB), host_budget_bytes=int(128 * GB), reach=3, **PAPER)
"""Figure 4's setting: everything that depends on the batch is proportional to it."""


def affine(blocks: int = 8, *, once: float = 2.0, each: float = 4.0) -> Callable[..., Profile]:
    """Profiles whose computations take ``once + each * batch_size`` seconds and whose activations are proportional."""

    def at(size: int, parts: int = 1) -> Profile:
        profile = in_parts(scaled(small_profile(blocks), size), parts)
        seconds = once * parts + each * size
        changed = tuple(
            replace(
                block,
                options=tuple(replace(o, forward_s=seconds, backward_s=2 * seconds) for o in block.options),
            )
            for block in profile.blocks
        )
        return replace(profile, blocks=changed)

    return at


# -- profiles at other sizes -----------------------------------------------------------------------------------------


def test_two_profiles_give_a_line() -> None:
    at = affine()
    low, high = at(2), at(6)
    for size in (1, 2, 4, 6, 9):
        assert scaled(low, size, high) == scaled(high, size, low)
        found, true = scaled(low, size, high), at(size)
        assert found.blocks[3].option("keep").backward_s == pytest.approx(true.blocks[3].option("keep").backward_s)
        assert abs(found.blocks[3].input_bytes - true.blocks[3].input_bytes) <= 1, "sizes are whole"
    assert scaled(low, 6, high) == high
    assert scaled(high, 2, low) == low


def test_nothing_is_less_in_a_larger_batch() -> None:
    low, high = small_profile(2), replace(small_profile(2), batch_size=4, shared_bytes=0)
    low = replace(low, shared_bytes=100)
    noisy = replace(high, blocks=tuple(replace(block, launch_s=-0.0, input_bytes=1) for block in high.blocks))
    found = scaled(low, 40, noisy)
    assert found.shared_bytes == 100
    assert found.blocks[1].input_bytes == 10
    found = scaled(replace(small_profile(2), shared_bytes=10), 1, replace(high, shared_bytes=1000))
    assert found.shared_bytes == 0, "and nothing is negative in a smaller one"


def test_options_that_only_one_size_has_are_left_out() -> None:
    low, high = small_profile(2), replace(small_profile(2), batch_size=4)
    fewer = replace(high, blocks=tuple(replace(block, options=block.options[:1]) for block in high.blocks))
    assert [o.name for o in scaled(low, 3, fewer).blocks[0].options] == ["keep"]


# -- relaxation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "seconds"), [(2, 4.28), (4, 2.902), (6, 2.763), (8, 2.695), (10, 2.670)])
def test_published_scan(size: int, seconds: float) -> None:
    profile = llama7b_b4()
    assert lower_bound(scaled(profile, size), CONFIG, PaperProgram) / size == pytest.approx(seconds, rel=5e-3)


# -- choice ----------------------------------------------------------------------------------------------------------


def throughput(plan: Plan) -> float:
    return plan.batch_size / plan.predicted.iteration_s


def test_sizes_that_the_planner_does_not_apply_to_are_not_chosen() -> None:
    _, plan = choose_batch(affine(3, once=40.0), Settings(memory=16_000, planner="pofo"), Choices(accumulate=1))
    refused = [point.batch_size for point in plan.batch_curve if "does not apply" in point.reason]
    assert (plan.planner, plan.batch_size < min(refused)) == ("pofo", True)
    assert f"batch_size={min(refused)} cannot be planned" in plan.notes[-1]
    with pytest.raises(UnsupportedError, match="planner='pofo' does not apply"):
        choose_batch(affine(3), Settings(memory=4_000, planner="pofo"), Choices(most=2, accumulate=1))


@pytest.mark.parametrize(("budget", "once", "each"), [(5_000, 2.0, 4.0), (7_000, 0.0, 5.0), (15_000, 4.0, 1.0)])
def test_it_is_the_best_of_all_sizes(budget: int, once: float, each: float) -> None:
    at = affine(3, once=once, each=each)
    profile, plan = choose_batch(at, Settings(memory=budget), Choices(most=9, accumulate=1))
    found = []
    for size in range(1, 10):
        try:
            found.append(throughput(solve(at(size), memory=budget)))
        except InfeasibleError:
            break
    assert throughput(plan) >= 0.97 * max(found)
    assert profile == at(plan.batch_size)
    assert plan.fingerprint == profile.fingerprint


def test_it_shows_the_curve_and_says_why() -> None:
    _, plan = choose_batch(affine(4), Settings(memory=8_000), Choices(most=40, accumulate=1))
    sizes = [point.batch_size for point in plan.batch_curve]
    assert sizes == sorted(set(sizes))
    assert 1 in sizes
    (chosen,) = [point for point in plan.batch_curve if point.reason == "chosen"]
    assert chosen.batch_size == plan.batch_size
    assert chosen.samples_per_s == pytest.approx(throughput(plan))
    assert chosen.device_peak_bytes == plan.predicted.device_peak_bytes
    assert chosen.iteration_s == plan.predicted.iteration_s
    assert all(point.reason for point in plan.batch_curve)
    assert plan.notes[-1].startswith(f"batch_size={plan.batch_size} gives ")
    text = " ".join(plan.explain().split())
    assert "Batch sizes:" in text
    assert ": chosen" in text


def test_of_equal_throughput_the_smallest_batch_is_taken() -> None:
    _, plan = choose_batch(affine(3, once=0.0), Settings(memory=10**7), Choices(most=200, accumulate=1))
    assert plan.batch_size < 100, "200 would be faster by a fraction of a percent"


def test_sizes_that_cannot_be_profiled_do_not_fit() -> None:
    at = affine(4, once=20.0)
    asked = []

    def limited(size: int, parts: int) -> Profile:
        asked.append(size)
        if size > 5:
            raise InfeasibleError(f"batch_size={size} is too much")
        return at(size)

    _, plan = choose_batch(limited, Settings(memory=10**6), Choices(most=64, accumulate=1))
    assert plan.batch_size == 5
    assert len(asked) == len(set(asked)), "nothing is profiled twice"
    (point,) = [point for point in plan.batch_curve if point.batch_size == 6]
    assert point.reason == "batch_size=6 is too much"
    assert point.samples_per_s is None
    assert "6 does not fit" in plan.notes[-1]


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="batch_size=1"):
        choose_batch(affine(), Settings(memory=1_000))

    def nothing(size: int, parts: int) -> Profile:
        raise InfeasibleError(f"not even {size}")

    with pytest.raises(InfeasibleError, match="not even 1"):
        choose_batch(nothing, Settings(memory=1_000))


def test_only_some_sizes() -> None:
    assert choose_batch(affine(), Settings(memory=10**6), Choices(most=1, accumulate=1))[1].batch_size == 1
    with pytest.raises(ConfigError, match="no batch size to choose from"):
        choose_batch(affine(), Settings(memory=10**6), Choices(most=0, accumulate=1))


@pytest.mark.parametrize("limit", [20, 100, 300])
def test_few_sizes_are_tried_of_which_a_step_does_not_fit(limit: int) -> None:
    asked, at = [], affine()

    def tried(size: int, parts: int) -> Profile:
        asked.append(size)
        if size >= limit:
            raise InfeasibleError(f"batch {size} does not fit")
        return at(size)

    _, plan = choose_batch(tried, Settings(memory=100_000), Choices(most=1000, accumulate=1))
    assert plan.batch_size < limit
    assert len(asked) <= 18, asked


def test_a_chunk_of_logits_does_not_grow_with_the_batch() -> None:
    profile = small_profile()
    last = profile.blocks[-1]
    chunked = replace(last.option("keep"), name="chunked", forward_peak_bytes=700, saved_bytes=40, chunk_tokens=8)
    wide = replace(profile, blocks=(*profile.blocks[:-1], replace(last, options=(*last.options, chunked))))
    found = scaled(wide, 4 * profile.batch_size).blocks[-1]
    assert (found.option("chunked").forward_peak_bytes, found.option("chunked").saved_bytes) == (700, 160)
    assert found.option("keep").forward_peak_bytes == 4 * last.option("keep").forward_peak_bytes


# -- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5_000, 9_000])
def test_a_larger_bound_never_gives_fewer_samples_per_second(budget: int) -> None:
    at, rates = affine(3), []
    for most in (1, 2, 4, 8, 16):
        _, plan = choose_batch(at, Settings(memory=budget), Choices(most=most, parts="auto"))
        assert plan.batch_size * plan.accumulate <= most
        rates.append(plan.samples_per_s)
    assert all(larger >= 0.99 * smaller for smaller, larger in pairwise(rates)), rates


@pytest.mark.parametrize(("budget", "once"), [(5_000, 2.0), (9_000, 8.0)])
def test_it_is_the_best_of_the_settings_that_it_may_choose(budget: int, once: float) -> None:
    at, settings, rates = affine(3, once=once), Settings(memory=budget), {}
    choices = Choices(most=6, parts="auto")
    _, plan = choose_batch(at, settings, choices)
    for samples in range(1, choices.most + 1):
        for split in choices.splits(samples):
            with suppress(InfeasibleError):
                wanted = replace(settings, accumulate=split.accumulate)
                rates[split] = make_plan(at(split.batch_size, split.parts), wanted).samples_per_s
    chosen = Split(plan.batch_size * plan.accumulate, plan.accumulate, plan.parts)
    assert plan.samples_per_s == pytest.approx(rates[chosen], rel=0.01)
    assert rates[chosen] >= 0.96 * max(rates.values()), (chosen, rates)


def test_splits_of_what_is_given() -> None:
    assert [*Choices(most=8, samples=4).splits(4)] == [Split(4, 1), Split(4, 2), Split(4, 4)]
    assert [*Choices(batch_size=4, parts="auto", accumulate=2).splits(8)] == [Split(8, 2, n) for n in (1, 2, 4)]
    assert [*Choices(parts=3, accumulate=1).splits(3)] == [Split(3, 1, 3)]
    assert not [*Choices(most=2, accumulate=1).splits(3)]
    assert Split(24, 2, 4).settings == "batch_size=12, micro_batches=4, accumulate_grad_batches=2"
    with pytest.raises(ConfigError, match="micro_batches=5 is more than the 4 samples"):
        Choices(most=4, parts=5).check()


def test_a_model_that_cannot_be_cut_is_chosen_for_without_parts() -> None:
    def whole(size: int, parts: int) -> Profile:
        if parts > 1:
            raise UnsupportedError("samples depend on each other")
        return affine(3)(size)

    _, plan = choose_batch(whole, Settings(memory=5_000), Choices(most=8, parts="auto"))
    assert plan.parts == 1
