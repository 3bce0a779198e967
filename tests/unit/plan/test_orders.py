"""Both orders of accumulation, priced against each other, and the number of parts that is chosen."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

import lt_offload
from lt_offload import InfeasibleError, UnsupportedError
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.batch.choose import choose_parts
from lt_offload.plan.batch.profiles import in_parts, layer_major, micro_batch_major
from lt_offload.plan.orders import compared
from lt_offload.schema.explain import BINDS, brief
from lt_offload.schema.profile import Profile
from tests.unit.plan.test_batch import affine

TOKENS = 64


@functools.cache
def estimated(samples: int, parts: int = 1, link: float = 0.0) -> Profile:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = lt_offload.profile_config(
        LlamaConfig(vocab_size=128, **sizes),
        batch_size=samples,
        sequence_length=TOKENS,
        hardware="rtx-3060-12gb",
        micro_batches=parts,
        padding=False,
    )
    # Without the context of a GPU and what its allocator maps at once, a thousand times larger than this model.
    machine = replace(found.hardware, context_bytes=0)
    if link:
        machine = replace(machine, h2d_bytes_per_s=link, d2h_bytes_per_s=link)
    return replace(found, hardware=machine, page_table_bytes=0, slack_bytes=0, slack_share=0.0)


def least(profile: Profile, **settings: Any) -> int:
    with pytest.raises(InfeasibleError) as error:
        make_plan(profile, Settings(memory=1, **settings))
    assert error.value.needed_bytes is not None
    return error.value.needed_bytes


def added(notes: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    """Return the new notes but that about what binds."""
    return [note for note in notes[len(before) :] if not note.startswith(BINDS)]


@pytest.mark.slow
def test_a_profile_says_what_is_there_for_all_parts_and_what_for_one() -> None:
    whole, parted = estimated(8), estimated(8, 4)
    assert (whole.parts, parted.parts) == (1, 4)
    for block, cut in zip(whole.blocks, parted.blocks, strict=True):
        assert [option.name for option in block.options] == [option.name for option in cut.options]
        for option, found in zip(block.options, cut.options, strict=True):
            assert found.saved_bytes + found.offload_bytes == option.saved_bytes + option.offload_bytes
        if block.kind == "layer":
            assert cut.option("recompute").backward_peak_bytes < 0.4 * block.option("recompute").backward_peak_bytes
        if block.kind == "head":
            assert cut == block


@pytest.mark.slow
def test_what_is_derived_is_near_what_is_measured() -> None:
    derived, parted = in_parts(estimated(8), 4), estimated(8, 4)
    assert derived.parts == 4
    assert in_parts(parted, 4) is parted
    for block, found in zip(parted.blocks, derived.blocks, strict=True):
        for option in block.options:
            mine = found.option(option.name)
            assert mine.saved_bytes == pytest.approx(option.saved_bytes, abs=1 << 14)
            assert mine.backward_peak_bytes == pytest.approx(option.backward_peak_bytes, rel=0.3, abs=1 << 18)


def test_both_orders_have_the_same_samples() -> None:
    part = estimated(2)
    whole = layer_major(part, 4)
    assert (whole.batch_size, whole.parts) == (8, 4)
    again = micro_batch_major(whole)
    assert (again.batch_size, again.parts) == (2, 1)
    names = [option.name for option in part.blocks[1].options]
    for name in names:
        mine, theirs = part.blocks[1].option(name), again.blocks[1].option(name)
        assert theirs.saved_bytes == pytest.approx(mine.saved_bytes, abs=4)
        assert theirs.forward_s == pytest.approx(mine.forward_s)


@pytest.mark.slow
def test_weights_that_travel_over_a_slow_link_make_layer_by_layer_faster() -> None:
    part = estimated(1, link=1e8)
    memory = int(1.3 * least(part, accumulate=8))
    settings = Settings(memory=memory, accumulate=8, solver_time_limit=1000)
    often = make_plan(part, settings)
    whole = estimated(8, 8, link=1e8)
    memory = max(memory, int(1.05 * least(whole)))
    once = make_plan(whole, Settings(memory=memory, solver_time_limit=1000))
    assert often.predicted.iteration_s > 1.4 * once.predicted.iteration_s
    settings = replace(settings, memory=memory)
    (said,) = added(compared(often, part, settings).notes, often.notes)
    assert said.startswith("layer-major (micro_batches=8 with batches of 8 samples) would take at least")
    assert "at best" in said
    assert "; it was not planned; set batch_size=8, micro_batches=8 " in said
    (said,) = added(compared(often, part, settings, thorough=True).notes, often.notes)
    assert said.startswith("layer-major (micro_batches=8 with batches of 8 samples) would take about")
    assert "times as fast as this plan" in said
    assert "; set batch_size=8, micro_batches=8 and accumulate_grad_batches=1 for it: " in said
    (said,) = added(compared(once, whole, Settings(memory=memory, solver_time_limit=1000)).notes, once.notes)
    assert said.startswith("micro-batch by micro-batch (accumulate=8 with batches of 1 samples) would take at least")
    assert "this plan is" in said
    assert "set " not in said


def test_an_order_that_does_not_fit_is_said() -> None:
    part = estimated(8)
    settings = Settings(memory=int(1.01 * least(part, accumulate=16)), accumulate=16, solver_time_limit=1000)
    plan = make_plan(part, settings)
    said = compared(plan, part, settings).notes[-1]
    assert said == "layer-major (micro_batches=16 with batches of 128 samples) was priced, too: no plan of it fits"


@pytest.mark.parametrize("memory", [6_000, 9_000])
def test_a_larger_update_is_named_where_it_is_worth_it(memory: int) -> None:
    at, settings = affine(8, once=0.1, each=1.0), Settings(memory=memory)
    plan = make_plan(at(1), settings)
    (said,) = set(compared(plan, at(1), settings).notes) - set(plan.notes)
    assert said.startswith(f"{BINDS}copies to device, ")
    named = re.search(r"about ([\d.]+) times the tokens per second with (\d+) tokens .*: batch_size=(\d+) ", said)
    assert named is not None, said
    size = int(named[3])
    assert int(named[2]) == size * plan.sequence_length
    larger = make_plan(at(size), settings)
    # Plans of larger updates are nearer to their programs, so that the estimate promises too little.
    assert 0.95 <= larger.samples_per_s / plan.samples_per_s / float(named[1]) <= 1.4
    assert "What binds: copies to device, " in " ".join(brief(compared(plan, at(1), settings)).split())


def test_no_larger_update_is_named_where_computing_binds() -> None:
    profile = affine(8, each=4.0)(1)
    plan = make_plan(profile, Settings(memory=10**6))
    assert compared(plan, profile, Settings(memory=10**6)).notes[-1] == f"{BINDS}compute, 100% busy"


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_number_of_parts_that_fits_is_chosen_and_measured() -> None:
    asked: list[int] = []

    def measure(parts: int) -> Profile:
        asked.append(parts)
        return estimated(8, parts)

    memory = int(0.9 * least(estimated(8)))
    profile, plan = choose_parts(measure, Settings(memory=memory, solver_time_limit=1000))
    assert asked == [1, plan.parts]
    assert plan.parts == profile.parts > 1
    assert plan.notes[-1].startswith(f"batch_size=8, micro_batches={plan.parts} gives ")


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_takes_whole_batches() -> None:
    whole = estimated(8)

    def measure(parts: int) -> Profile:
        if parts > 1:
            raise UnsupportedError("samples depend on each other")
        # In the profile of the whole batch a part looks faster than it is.
        blocks = tuple(replace(block, options=block.options[:2]) for block in whole.blocks)
        return replace(whole, blocks=blocks)

    settings = Settings(memory=int(1.2 * least(measure(1))), solver_time_limit=1000, activation_offload=False)
    profile, plan = choose_parts(measure, settings)
    assert plan.parts == 1
    with pytest.raises(InfeasibleError, match="memory=.* is enough"):
        choose_parts(measure, replace(settings, memory=int(0.9 * least(measure(1)))))
