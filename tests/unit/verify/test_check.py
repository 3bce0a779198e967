"""Every rule of check() is broken on purpose; the violation must name the op and the rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lt_offload.plan.iteration.decisions import Decisions, TensorDecision
from lt_offload.plan.iteration.memory import device_bytes, host_bytes
from lt_offload.plan.planners.baselines import streaming_decisions
from lt_offload.plan.verify.check import check
from lt_offload.schema.plan import InitialCopy, Op, Plan
from lt_offload.schema.profile import Profile
from tests.support.profiles.by_hand import built
from tests.support.profiles.small import (
    changed,
    edited,
    named,
    resident,
    small_profile,
    stays,
    swapped,
    with_op,
    with_options,
    without,
    words,
)

PROFILE = small_profile(6, frozen=(4,))


def everything() -> Plan:
    """A plan with every kind of op: one block on the host, one paged, one written back, one frozen that travels."""
    decisions: Decisions = resident(PROFILE)
    decisions = changed(decisions, 1, TensorDecision(place="host", stays=stays((1, 2), (10, 10))))
    decisions = changed(decisions, 2, TensorDecision(place="paged", stays=stays((9, 3)), write_back=2))
    decisions = changed(decisions, 3, TensorDecision(place="device", stays=stays((8, 10), (3, 4)), write_back=9))
    decisions = changed(decisions, 4, TensorDecision(place="none", stays=stays((4, 4), (7, 7))))
    decisions = with_options(decisions, "keep", "recompute", "offload", "keep", "keep", "keep")
    plan = built(decisions, PROFILE, lead=1, lag=1, arrivals={1: (0, 8), 2: (7,), 3: (7, 1), 4: (3, 6)})
    return replace(plan, budget_bytes=int(device_bytes(plan, PROFILE).max()))


PLAN = everything()
OPS = [op.id for op in PLAN.ops]


def ids(value: int) -> str:
    return words(PLAN.ops[value])


def test_the_plan_itself_is_good() -> None:
    assert check(PLAN, PROFILE) == []
    kinds = {(op.kind, op.payload, op.lane) for op in PLAN.ops}
    assert len(kinds) == 12, "every kind of op there is"


@pytest.mark.parametrize("gone", OPS, ids=ids)
def test_no_op_can_be_left_out(gone: int) -> None:
    found = check(without(PLAN, PLAN.ops[gone]), PROFILE)
    assert found
    op = PLAN.ops[gone]
    text = " ".join(found)
    names = [PROFILE.tensors[t].name for t in PLAN.tensors(op)] + [f"step {op.step}", f"block{op.block}"]
    assert any(name in text for name in names), text


def streamed_plans() -> Iterator[tuple[Plan, Profile]]:
    for states, host_update, lead, option in itertools.product((0, 2), (False, True), (0, 1), ("keep", "offload")):
        profile = small_profile(5, states=states, frozen=(2,), tied=True)
        decisions = streaming_decisions(profile, (option,) * 5, host_update=host_update)  # type: ignore[arg-type]
        yield built(decisions, profile, lead=lead, lag=lead), profile


def kind_of(op: Op) -> str:
    return " ".join(part for part in (op.kind, op.payload, op.lane) if part)


def test_every_kind_of_dependency_is_missed() -> None:
    """A single dependency may be implied by others; of each kind, some are not."""
    missed: set[tuple[str, str]] = set()
    present: set[tuple[str, str]] = set()
    for plan, profile in [(PLAN, PROFILE), *streamed_plans()]:
        for op in plan.ops:
            for other in op.after:
                pair = (kind_of(op), kind_of(plan.ops[other]))
                present.add(pair)
                after = tuple(o for o in op.after if o != other)
                found = check(with_op(plan, op, after=after), profile)
                assert all("after: it is not ordered after op" in violation for violation in found)
                if found:
                    missed.add(pair)
    assert present - missed == {
        # the same lane, in this order
        ("update compute", "backward compute"),
        # the copy before on the same lane waited for it, or the release of the range did
        ("backward compute", "offload activation d2h"),
        ("drop weight none", "update compute"),
        ("offload state d2h", "update compute"),
        ("offload weight d2h", "forward compute"),
        ("prefetch activation h2d", "forward compute"),
        ("prefetch state h2d", "update compute"),
        ("prefetch weight h2d", "offload weight d2h"),
        ("prefetch weight h2d", "update compute"),
    }


@pytest.mark.parametrize("op", [op for op in PLAN.ops if op.offsets], ids=words)
def test_offsets_are_checked(op: Op) -> None:
    moved = check(with_op(PLAN, op, offsets=tuple(o + 8 for o in op.offsets)), PROFILE)
    assert moved[0].startswith(f"op {op.id} ")
    assert "multiples of 512" in moved[0]
    outside = check(with_op(PLAN, op, offsets=(PLAN.arena_bytes,)), PROFILE)
    assert any(f"op {op.id} " in found and "the extent is" in found for found in outside)
    onto = PLAN.initial[0].offset
    assert any(
        f"op {op.id} " in found and "overlaps" in found for found in check(with_op(PLAN, op, offsets=(onto,)), PROFILE)
    )


def groups_of(payload: str, *tensors: int) -> tuple[int, ...]:
    """The groups of these tensors, one each."""
    return tuple(PLAN.groups.index(g) for t in tensors for g in PLAN.groups if g.payload == payload and t in g.tensors)


def with_sizes(payload: str, sizes: tuple[int, ...]) -> Plan:
    groups = [replace(group, sizes=sizes) if group.payload == payload else group for group in PLAN.groups]
    return replace(PLAN, groups=tuple(groups))


def with_gradients(tensors: tuple[int, ...]) -> Plan:
    """Block 1 sends these gradients."""
    op = named(PLAN, "10 offload grad 1")
    groups = list(PLAN.groups)
    groups[op.groups[0]] = replace(groups[op.groups[0]], tensors=tensors, sizes=(1024,) * len(tensors))
    plan = replace(PLAN, groups=tuple(groups), gradient_bytes=PLAN.gradient_bytes + 1024)
    ops = [replace(other, bytes=1000 * len(tensors)) if other is op else other for other in PLAN.ops]
    return replace(plan, ops=tuple(ops))


def kept_through_the_update() -> Plan:
    """Block 1's weight stays on the device while the host updates it."""
    first, again, drop = (named(PLAN, f"{what} weight 1") for what in ("0 prefetch", "8 prefetch", "10 drop"))
    kept = InitialCopy(group=again.groups[0], offset=again.offsets[0])
    plan = without(PLAN, first, drop)
    return replace(plan, initial=(*plan.initial, kept))


def fetched_gradient() -> Plan:
    fetch, sent = named(PLAN, "0 prefetch weight 1"), named(PLAN, "10 offload grad 1")
    return with_op(PLAN, fetch, payload="grad", groups=sent.groups)


CASES: dict[str, tuple[Callable[[], Plan], str]] = {
    "another model": (lambda: replace(PLAN, fingerprint="0"), "fingerprint"),
    "too few options": (lambda: replace(PLAN, options=PLAN.options[1:]), "options"),
    "unknown option": (lambda: replace(PLAN, options=("mixed", *PLAN.options[1:])), "does not offer 'mixed'"),
    "too few places": (lambda: replace(PLAN, update_places=PLAN.update_places[1:]), "update places"),
    "frozen updated": (lambda: replace(PLAN, update_places=("device",) * 6), "for a frozen tensor"),
    "place and op differ": (
        lambda: replace(PLAN, update_places=("host", *PLAN.update_places[1:])),
        "weight0 is to be updated at host",
    ),
    "no room for states": (lambda: with_sizes("state", (512,)), "are not those of the model's tensors"),
    "another timeline": (lambda: replace(PLAN, timeline=PLAN.timeline[::-1]), "timeline: it is not that"),
    "ids": (lambda: replace(PLAN, ops=(PLAN.ops[1], PLAN.ops[0], *PLAN.ops[2:])), "ids"),
    "unknown dependency": (lambda: with_op(PLAN, PLAN.ops[0], after=(10**6,)), "do not exist"),
    "unknown tensor": (lambda: with_op(PLAN, PLAN.ops[0], groups=(99,)), "groups: it names some that do not exist"),
    "unknown step": (lambda: with_op(PLAN, PLAN.ops[-1], step=12), "there are 12 steps"),
    "wrong lane": (lambda: with_op(PLAN, named(PLAN, "0 prefetch weight 1"), lane="d2h"), "lane"),
    "no payload": (lambda: with_op(PLAN, named(PLAN, "0 prefetch weight 1"), payload=None), "payload: missing"),
    "payload too many": (lambda: with_op(PLAN, named(PLAN, "0 forward 0"), payload="weight"), "payload: only copies"),
    "gradient fetched": (lambda: fetched_gradient(), "offloaded only"),
    "never given back": (lambda: with_op(PLAN, named(PLAN, "10 offload grad 1"), release_after=None), "release_after"),
    "given back too early": (lambda: with_op(PLAN, named(PLAN, "10 offload grad 1"), release_after=9), "release_after"),
    "tensors of a computation": (lambda: with_op(PLAN, named(PLAN, "0 forward 0"), groups=(1,)), "none belong to it"),
    "no tensors": (lambda: with_op(PLAN, named(PLAN, "10 update 1"), groups=()), "groups: missing"),
    "no offsets": (lambda: with_op(PLAN, named(PLAN, "0 prefetch weight 1"), offsets=()), "offsets: 0 for 1 groups"),
    "wrong size": (lambda: with_op(PLAN, named(PLAN, "0 prefetch weight 1"), bytes=1), "bytes: 1 are given"),
    "wrong block": (lambda: with_op(PLAN, named(PLAN, "0 forward 0"), block=1), "the step is one of block 0"),
    "wrong direction": (lambda: with_op(PLAN, named(PLAN, "0 forward 0"), kind="backward"), "the step is a forward"),
    "phases swapped": (lambda: swapped(PLAN, named(PLAN, "0 prefetch weight 1").id), "issued after ops of a later"),
    "update elsewhere": (lambda: with_op(PLAN, named(PLAN, "10 update 1"), step=11, block=0), "complete in step 10"),
    "updated twice": (
        lambda: with_op(PLAN, named(PLAN, "11 update 0"), groups=groups_of("weight", 0, 1)),
        "is updated by op",
    ),
    "sent though not on the host": (
        lambda: with_gradients((1, 0)),
        "weight0 sends it once, if the host updates it",
    ),
    "activations back too early": (
        lambda: with_op(PLAN, named(PLAN, "2 offload activation 2"), release_after=8),
        "in this order",
    ),
    "arena too small": (lambda: replace(PLAN, arena_bytes=PLAN.arena_bytes - 512), "the extent is"),
    "initial missing": (lambda: replace(PLAN, initial=PLAN.initial[1:]), "weight weight0 is not on the device"),
    "initial unused": (
        lambda: replace(PLAN, initial=(*PLAN.initial, InitialCopy(group=groups_of("weight", 4)[0], offset=8192 * 100))),
        "weight weight4 is on the device already",
    ),
    "outdated on the device": (kept_through_the_update, "its weight weight1 is from before the host's update"),
    "not there at the end": (lambda: without(PLAN, named(PLAN, "7 prefetch weight 2")), "cyclic residency"),
    "initial too many": (lambda: replace(PLAN, initial=(*PLAN.initial, PLAN.initial[0])), "is there twice"),
    "initial elsewhere": (
        lambda: replace(
            PLAN, initial=(replace(PLAN.initial[0], offset=PLAN.initial[0].offset + 10**6), *PLAN.initial[1:])
        ),
        "the extent is",
    ),
    "memory": (lambda: replace(PLAN, budget_bytes=PLAN.budget_bytes - 1), "1 bytes too many"),
    "ram": (
        lambda: replace(PLAN, host_budget_bytes=host_bytes(PLAN, PROFILE) - 1),
        "host budget",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_plans_are_found(case: str) -> None:
    make, rule = CASES[case]
    found = check(make(), PROFILE)
    assert any(rule in violation for violation in found), found


def test_a_weight_is_not_dropped_before_its_write_back_is_queued() -> None:
    drop = named(PLAN, "10 drop weight 3")
    ops = [op for op in PLAN.ops if op.id != drop.id]
    at = next(i for i, op in enumerate(ops) if words(op) == "9 offload state 2") + 1
    ops.insert(at, replace(drop, step=9))
    late = ops.pop(next(i for i, op in enumerate(ops) if words(op) == "9 offload weight 3"))
    at = next(i for i, op in enumerate(ops) if words(op) == "10 drop weight 1")
    ops.insert(at, replace(late, step=10))
    found = check(edited(PLAN, ops), PROFILE)
    assert any("drop weight 3, step 9" in violation and "would be lost" in violation for violation in found), found
    assert any("offload weight 3, step 10" in violation and "not on the device" in violation for violation in found)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("op", [0, len(PLAN.ops) // 2, len(PLAN.ops) - 1])
def test_times_are_times(op: int, seconds: float) -> None:
    (found,) = check(with_op(PLAN, PLAN.ops[op], seconds=seconds), PROFILE)
    assert found.startswith(f"op {op} ")
    assert f"seconds: {seconds} is no time" in found


@pytest.mark.parametrize("op", [op.id for op in PLAN.ops if op.seconds], ids=ids)
def test_work_takes_time(op: int) -> None:
    (found,) = check(with_op(PLAN, PLAN.ops[op], seconds=0.0), PROFILE)
    assert found.startswith(f"op {op} ")
    assert "seconds: it takes none" in found


def test_another_machine_has_other_times() -> None:
    faster = replace(PROFILE.hardware, h2d_bytes_per_s=3 * PROFILE.hardware.h2d_bytes_per_s)
    assert check(PLAN, replace(PROFILE, hardware=faster)) == []
