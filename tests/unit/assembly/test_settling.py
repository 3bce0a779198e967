"""A settling pass moves what its updates need, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lt_offload import Plan, solve
from lt_offload.errors import InfeasibleError
from lt_offload.plan.iteration.settling import with_settling_pass
from lt_offload.plan.verify.check import check
from lt_offload.schema.accesses import IN_ARENA
from lt_offload.schema.plan import InitialCopy, Op, Pass, TensorGroup
from lt_offload.schema.profile import Profile
from tests.support.profiles.fixtures import tensor
from tests.support.profiles.program_rules import KINDS, random_profile
from tests.support.profiles.small import small_profile


@dataclass
class Presence:
    """A group on the device, from one op of a pass to another."""

    group: int
    low: int
    high: int
    begin: int
    end: int = 10**9
    updated: bool = False


def presences(plan: Plan) -> list[Presence]:
    """What is on the device during the settling pass of ``plan``; ends are those of steps, where ops say so."""
    there: dict[int, Presence] = {}
    found: list[Presence] = []
    leaving: dict[int, list[int]] = defaultdict(list)

    def come(group: int, low: int, begin: int) -> None:
        there[group] = Presence(group, low, low + plan.groups[group].bytes, begin)
        found.append(there[group])

    for copy in plan.initial:
        come(copy.group, copy.offset, -1)
    for op in plan.program("settling"):
        for step in [step for step in leaving if step < op.step]:
            for group in leaving.pop(step):
                there.pop(group).end = op.id
        if op.kind == "update" and op.lane != "host":
            for one in there.values():
                one.updated |= not set(plan.tensors(op)).isdisjoint(plan.groups[one.group].tensors)
        elif op.payload in IN_ARENA and op.kind == "prefetch":
            for group, low in zip(op.groups, op.offsets, strict=True):
                come(group, low, op.id)
        elif op.payload in IN_ARENA and op.kind == "drop":
            for group in op.groups:
                there.pop(group).end = op.id
        elif op.payload in IN_ARENA and op.release_after is not None:
            leaving[op.release_after] += op.groups
    return found


def middle(profile: Profile) -> int:
    """A budget between the least and one with room for everything."""
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, memory=1, delayed=True)
    assert caught.value.needed_bytes is not None
    everything = sum(3 * one.bytes + one.state_bytes for one in profile.tensors)
    return int(caught.value.needed_bytes + 0.3 * everything)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_every_copy_to_the_device_is_for_an_update_or_brings_back_what_had_to_make_room(seed: int) -> None:
    profile = random_profile(np.random.default_rng(seed), KINDS[seed % len(KINDS)])
    plan = solve(profile, memory=middle(profile), time_limit=1, delayed=True)
    assert check(plan, profile) == []
    on_host = {t for op in plan.ops if op.updates_on_host for t in plan.tensors(op)}
    everything = presences(plan)
    before: dict[int, Presence] = {}
    for one in everything:
        former = before.get(one.group)
        before[one.group] = one
        if one.begin < 0 or one.updated or not on_host.isdisjoint(plan.groups[one.group].tensors):
            continue
        assert former is not None, "only an update makes something come that was not there at the start"
        away = [other for other in everything if other.group != one.group]
        away = [other for other in away if other.low < former.high and former.low < other.high]
        assert former.low != one.low or any(o.begin < one.begin and former.end < o.end for o in away)


def _op(id: int, kind: str, step: int, **values: object) -> Op:
    lanes = {"prefetch": "h2d", "offload": "d2h", "update": "compute"}
    return Op(id=id, kind=kind, step=step, block=0, lane=lanes.get(kind, "none"), **values)  # type: ignore[arg-type]


def _both(beginning: bool = True) -> tuple[Pass, ...]:
    return ("beginning", "updating") if beginning else ("updating",)


def _by_hand(*, taken: bool) -> tuple[Plan, Profile]:
    """A pass over four weights of 512 bytes: the first is trained, the second and third are not, the fourth neither.

    The first and the second travel together for the backward, which updates the first. The third is there at the
    start, leaves and comes back; ``taken``: what comes for the update has its place meanwhile.
    """
    profile = replace(small_profile(), tensors=tuple(tensor(str(at), (128,), 0, trainable=not at) for at in range(4)))
    weights = [TensorGroup(payload="weight", tensors=(at,), sizes=(512,)) for at in range(4)]
    place = 512 if taken else 0
    weight = {"payload": "weight"}
    ops = (
        _op(0, "prefetch", 0, groups=(3,), offsets=(1536,), bytes=512, **weight),
        _op(1, "drop", 0, groups=(2,), bytes=512, after=(0,), **weight),
        _op(2, "drop", 0, groups=(3,), bytes=512, **weight),
        _op(3, "prefetch", 1, groups=(0, 1), offsets=(place, 1024), bytes=1024, after=(2,), **weight),
        _op(4, "update", 1, groups=(0,), after=(3,)),
        _op(5, "offload", 1, groups=(0,), bytes=512, release_after=1, after=(4,), **weight),
        _op(6, "drop", 1, groups=(1,), bytes=512, after=(4,), **weight),
        _op(7, "prefetch", 2, groups=(2,), offsets=(512,), bytes=512, after=(5,), **weight),
    )
    plan = replace(
        solve(small_profile(), memory="1GB", time_limit=3),
        groups=tuple(weights),
        initial=(InitialCopy(group=2, offset=512),),
        ops=tuple(replace(op, passes=_both(op.kind != "update")) for op in ops),
    )
    return plan, profile


@pytest.mark.parametrize("taken", [False, True])
def test_what_shares_a_copy_with_an_update_stays_behind_and_what_nobody_displaces_stays(taken: bool) -> None:
    plan, profile = _by_hand(taken=taken)
    found = with_settling_pass(plan, profile)
    settling = [(op.kind, op.groups, op.bytes) for op in found.program("settling")]
    update = [("prefetch", (0,), 512), ("update", (0,), 0), ("offload", (0,), 512)]
    assert settling == ([("drop", (2,), 512), *update, ("prefetch", (2,), 512)] if taken else update)
    # Other passes move what they moved, and whoever waited for a copy waits for both ops that stand for it.
    assert [(op.kind, op.groups) for op in found.program("beginning")] == [
        (op.kind, op.groups) for op in plan.program("beginning")
    ]
    fetches = [op.id for op in found.ops if op.kind == "prefetch" and 0 in op.groups]
    assert [found.ops[number].groups for number in fetches] == [(0, 1), (0,)]
    (update_op,) = (op for op in found.ops if op.kind == "update")
    assert update_op.after == tuple(fetches)
    assert [op.id for op in found.ops] == list(range(len(found.ops)))


def test_what_an_update_has_changed_goes_to_the_host_where_other_passes_drop_it() -> None:
    plan, profile = _by_hand(taken=False)
    states = TensorGroup(payload="state", tensors=(0,), sizes=(1536,))
    state: dict[str, Any] = {"payload": "state", "groups": (4,), "bytes": 1024}
    weight: dict[str, Any] = {"payload": "weight", "groups": (0,), "bytes": 512}
    ops = (
        _op(0, "prefetch", 0, offsets=(0,), **weight),
        _op(1, "update", 0, groups=(0,), after=(0,)),
        _op(2, "offload", 0, release_after=0, after=(1,), **weight),
        _op(3, "offload", 0, release_after=0, after=(1,), **state),
        _op(4, "drop", 0, **state),
        _op(5, "prefetch", 1, offsets=(2048,), after=(3, 4), **state),
    )
    passes = (_both(), ("updating",), ("updating",), ("updating",), ("beginning",), _both())
    ops = tuple(replace(op, passes=which) for op, which in zip(ops, passes, strict=True))
    initial = (InitialCopy(group=4, offset=2048),)
    plan = replace(plan, groups=(*plan.groups, states), initial=initial, ops=ops)
    found = with_settling_pass(plan, profile).program("settling")
    assert [(op.kind, op.release_after) for op in found if op.payload == "state"] == [("offload", None)]


def test_a_weight_that_is_there_at_the_start_comes_back_when_the_host_has_updated_it() -> None:
    plan, profile = _by_hand(taken=False)
    weight: dict[str, Any] = {"payload": "weight", "groups": (0,), "bytes": 512}
    ops = (
        _op(0, "drop", 0, **weight),
        replace(_op(1, "update", 0, groups=(0,)), lane="host"),
        _op(2, "prefetch", 1, offsets=(512,), after=(0, 1), **weight),
    )
    ops = tuple(replace(op, passes=_both(op.kind != "update")) for op in ops)
    plan = replace(plan, initial=(InitialCopy(group=0, offset=512),), ops=ops)
    assert [op.kind for op in with_settling_pass(plan, profile).program("settling")] == ["drop", "update", "prefetch"]
