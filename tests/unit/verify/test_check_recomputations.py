"""A valid plan with forwards that run again and direct access, edited as a person might: check names op and rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lt_offload.plan.iteration.decisions import Recomputation, TensorDecision
from lt_offload.plan.iteration.memory import device_bytes
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.small import (
    HUGE,
    chained,
    changed,
    edited,
    named,
    resident,
    small_profile,
    stays,
    swapped,
    with_op,
    with_options,
    with_zero_copy,
    without,
    words,
)

PROFILE = with_zero_copy(chained(small_profile(5, frozen=(3,))))


def everything() -> Plan:
    """Inputs that are kept, reloaded and discarded; weights that are read directly always, once and never."""
    decisions = resident(PROFILE)
    decisions = changed(decisions, 0, TensorDecision(place="host", zero_copy=(0, 8, 9), grad_zero_copy=True))
    decisions = changed(decisions, 1, TensorDecision(place="host", stays=stays((1, 1), (6, 8))))
    decisions = changed(decisions, 2, TensorDecision(place="device", stays=stays((6, 7)), zero_copy=(2,), write_back=7))
    decisions = changed(decisions, 3, TensorDecision(place="none", zero_copy=(3,), stays=stays((6, 6))))
    decisions = with_options(decisions, "recompute", "reload", "discard", "discard", "keep")
    recomputations = {
        6: (
            Recomputation(block=1, save="input"),
            Recomputation(block=2, save="input"),
            Recomputation(block=3, save="all"),
        ),
        7: (Recomputation(block=2, save="all"),),
        8: (Recomputation(block=0, save="input"), Recomputation(block=1, save="all")),
    }
    decisions = replace(decisions, recomputations=recomputations)
    plan = built(decisions, PROFILE, lag=1, arrivals={1: (0, 6), 2: (5,)}, activations={1: (2, 5)})
    return replace(plan, budget_bytes=int(device_bytes(plan, PROFILE).max()))


PLAN = everything()
AGAIN = [op for op in PLAN.ops if op.save is not None]
COMPUTED = [op for op in PLAN.ops if op.kind in ("forward", "backward")]


def test_the_plan_itself_is_good() -> None:
    assert check(PLAN, PROFILE) == []
    assert {op.save for op in AGAIN} == {"input", "all"}
    assert {op.zero_copy for op in COMPUTED} == {(), (0,), (2,), (3,)}


@pytest.mark.parametrize("op", PLAN.ops, ids=words)
def test_no_op_can_be_left_out(op: Op) -> None:
    found = check(without(PLAN, op), PROFILE)
    if words(op) in ("7 forward 2", "8 forward 0", "8 forward 1"):
        # The input of their blocks is saved: backwards can do with that, and nothing else needs what they return.
        assert found == []
        return
    places = [f"step {op.step}", f"block{op.block}", *(f"weight{t}" for t in PLAN.tensors(op))]
    assert found
    assert any(place in found[0] for place in places) or "run again: nothing is saved" in found[0], found


@pytest.mark.parametrize("op", PLAN.ops, ids=words)
@pytest.mark.parametrize("difference", [-1, 1])
def test_sizes_are_checked(op: Op, difference: int) -> None:
    found = check(with_op(PLAN, op, bytes=op.bytes + difference), PROFILE)
    assert found[0].startswith(f"op {op.id} (")
    assert ": bytes: " in found[0]


@pytest.mark.parametrize("op", [op for op in PLAN.ops if op.kind != "drop"], ids=words)
def test_steps_and_blocks_are_checked(op: Op) -> None:
    for fields in ({"step": op.step + 1}, {"step": op.step - 1}, {"block": op.block + 1}, {"block": op.block - 1}):
        found = check(with_op(PLAN, op, **fields), PROFILE)
        harmless = op.kind in ("prefetch", "offload") and op.payload != "activation" and "block" in fields
        assert found or (harmless and 0 <= fields["block"] < 5), (words(op), fields)


OTHERWISE = {
    # From block 0 on, which runs again before it is needed.
    ("6 forward 1", "nothing"): None,
    ("6 forward 1", "all"): ("8 forward 1", "everything is saved of it already"),
    ("6 forward 2", "nothing"): ("7 forward 2", "its input is not saved, nor has block 1 run again right before"),
    ("6 forward 2", "all"): ("7 forward 2", "everything is saved of it already"),
    ("6 forward 3", "nothing"): ("6 backward 3", "nothing is saved of the block"),
    ("6 forward 3", "input"): None,
    ("7 forward 2", "nothing"): ("7 backward 2", "nothing is saved of the block"),
    ("7 forward 2", "input"): None,
    ("8 forward 0", "nothing"): None,
    ("8 forward 0", "all"): ("9 backward 0", "bytes: 300 are given, it reads 200 directly"),
    ("8 forward 1", "nothing"): ("8 backward 1", "nothing is saved of the block"),
    ("8 forward 1", "input"): None,
}
"""Other things to save: the op and the rule that suffer, None if it is another valid plan."""


@pytest.mark.parametrize(("text", "save"), OTHERWISE)
def test_what_is_saved_is_checked(text: str, save: str) -> None:
    found = check(replace(with_op(PLAN, named(PLAN, text), save=save), budget_bytes=HUGE), PROFILE)
    expected = OTHERWISE[text, save]
    if expected is None:
        assert found == []
    else:
        (violation,) = found
        assert violation.startswith(f"op {named(PLAN, expected[0]).id} (")
        assert expected[1] in violation


@pytest.mark.parametrize("at", range(len(PLAN.ops) - 1))
def test_neighbours_cannot_be_swapped(at: int) -> None:
    """Unless both are prefetches of one step."""
    first, second = PLAN.ops[at], PLAN.ops[at + 1]
    found = check(swapped(PLAN, at), PROFILE)
    alike = first.step == second.step and first.kind == second.kind == "prefetch"
    assert bool(found) != alike, (words(first), words(second), found)


def test_direct_reads_wait_for_write_backs() -> None:
    decision = TensorDecision(place="device", zero_copy=(1,), stays=stays((8, 8)), write_back=8)
    decisions = changed(resident(PROFILE), 1, decision)
    plan = built(decisions, PROFILE)
    read, written = named(plan, "1 forward 1"), named(plan, "8 offload weight 1")
    ops = [replace(op, after=()) if op is read else op for op in plan.ops]
    (violation,) = check(replace(plan, ops=tuple(ops)), PROFILE)
    assert violation.startswith(f"op {read.id} (")
    assert f"not ordered after op {written.id} " in violation


def fetched_late() -> Plan:
    late = replace(named(PLAN, "5 prefetch activation 1"), step=7)
    ops = [op for op in PLAN.ops if op.id != late.id]
    ops.insert(ops.index(named(PLAN, "7 forward 2")), late)
    return edited(PLAN, ops)


def _edited(text: str, rule: str, **fields: Any) -> tuple[Callable[[], Plan], str, str]:
    """The plan with other fields of one op, which is named with the rule."""
    return lambda: with_op(PLAN, named(PLAN, text), **fields), text, rule


CASES: dict[str, tuple[Callable[[], Plan], str, str]] = {
    "saves in a forward step": _edited("1 forward 1", "save: only forwards that run again", save="all"),
    "a backward that saves": _edited("6 backward 3", "save: only forwards that run again", save="all"),
    "a second first forward": _edited("6 forward 1", "block: the step is one of block 3", save=None),
    "a block that comes later": _edited("8 forward 1", "only that and earlier ones may run again", block=2),
    "after its backward": _edited("8 forward 0", "only that and earlier ones may run again", block=4),
    "descending": (lambda: swapped(PLAN, named(PLAN, "8 forward 0").id), "8 forward 0", "blocks ascend"),
    "fetched too late": (fetched_late, "6 forward 1", "its activations have not been fetched"),
    "a tensor of another block": _edited("2 forward 2", "zero_copy: tensor 1 is none of its block", zero_copy=(1,)),
    "a tensor that does not exist": _edited("2 forward 2", "groups: it names some that do not exist", zero_copy=(99,)),
    "direct twice": _edited("2 forward 2", "groups: it names one twice", zero_copy=(2, 2)),
    "a copy that reads directly": _edited("5 prefetch weight 2", "zero_copy: only computations", zero_copy=(2,)),
    "neither direct nor there": _edited(
        "2 forward 2", "residency: weight weight2 is not on the device", zero_copy=(), bytes=0
    ),
    "direct before it is written back": (
        lambda: without(PLAN, named(PLAN, "7 offload weight 2")),
        "2 forward 2",
        "zero_copy: the host copy of weight weight2 is outdated",
    ),
    "direct beside its update on the host": _edited("0 forward 0", "not ordered after op", after=()),
    "read by a backward on the device alone": _edited(
        "8 backward 1", "bytes: 100 are given, it reads 200 directly", zero_copy=(1,), bytes=100
    ),
    "a gradient that is held though written": _edited(
        "8 offload grad 1", "release_after: a gradient that the backward writes", lane="compute"
    ),
    "a gradient before its backward": _edited("9 offload grad 0", "order", step=8, block=1),
    "a gradient written on the host's lane": _edited("9 offload grad 0", "lane: it occupies host", lane="host"),
    "a weight fetched by a computation": _edited(
        "5 prefetch weight 2", "lane: it occupies compute, it should be h2d", lane="compute"
    ),
    "a place that sends no gradients": (
        lambda: replace(PLAN, update_places=("device", *PLAN.update_places[1:])),
        "9 offload grad 0",
        "gradient: weight0 sends it once, if the host updates it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_edited_plans_are_refused(case: str) -> None:
    make, text, rule = CASES[case]
    plan = make()
    # By its name in the edited plan, or by where it stood before it was edited.
    where = [op.id for op in plan.ops if words(op) == text] or [named(PLAN, text).id]
    found = check(plan, PROFILE)
    assert any(violation.startswith(f"op {where[0]} (") and rule in violation for violation in found), found


def with_blocks(**fields: Any) -> Profile:
    return replace(PROFILE, blocks=tuple(replace(block, **fields) for block in PROFILE.blocks))


def test_profiles_that_do_not_allow_it_are_named() -> None:
    found = check(PLAN, with_blocks(chained=False))
    assert any("block block2: run again: option 'discard', but the input of block2" in text for text in found), found
    (first,) = [op.id for op in PLAN.ops if words(op) == "6 forward 2"]
    assert any(text.startswith(f"op {first} (") and "nor is it what the block before returns" in text for text in found)
    undirected = replace(PROFILE, tensors=tuple(replace(tensor, zero_copy=None) for tensor in PROFILE.tensors))
    found = check(PLAN, undirected)
    assert any("zero_copy: weight0 cannot be accessed in host memory" in text for text in found), found
    assert sum("cannot be accessed" in text for text in found) == 6
    fewer = replace(
        PROFILE,
        blocks=tuple(
            replace(block, options=tuple(o for o in block.options if o.name != "keep")) if index != 4 else block
            for index, block in enumerate(PROFILE.blocks)
        ),
    )
    found = check(PLAN, fewer)
    assert len(found) == 3
    assert all("save: the block has no option 'keep'" in text for text in found)


def test_frozen_blocks_run_again_for_others_only() -> None:
    profile = chained(small_profile(3, frozen=(0, 1), no_backward=2))
    decisions = replace(
        with_options(resident(profile), "keep", "keep", "discard"),
        recomputations={
            3: (
                Recomputation(block=0, save="nothing"),
                Recomputation(block=1, save="nothing"),
                Recomputation(block=2, save="all"),
            )
        },
    )
    plan = built(decisions, profile)
    assert check(plan, profile) == []
    wrong = replace(
        decisions, recomputations={3: (Recomputation(block=0, save="all"), *decisions.recomputations[3][1:])}
    )
    (found,) = check(built(wrong, profile), profile)
    assert "save: 'all', but the block has no backward" in found


def test_an_idle_backward_reads_nothing() -> None:
    profile = with_zero_copy(small_profile(3, frozen=(0,), no_backward=1))
    plan = built(resident(profile), profile)
    idle = named(plan, "5 backward 0")
    ops = tuple(replace(op, zero_copy=(0,)) if op is idle else op for op in plan.ops)
    (found,) = check(replace(plan, ops=ops), profile)
    assert found.startswith(f"op {idle.id} (")
    assert "zero_copy: it computes nothing" in found
