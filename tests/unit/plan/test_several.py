"""Several processes of one machine: what they have in common counts once, all else in each; what a card more buys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lt_offload.errors import ConfigError, InfeasibleError, PlanError
from lt_offload.execute.memory.common import check_beside
from lt_offload.plan import Settings, check, simulate, solve
from lt_offload.plan import make_plan as plans
from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision, hosted
from lt_offload.plan.iteration.durations import (
    PART_BYTES,
    between_s,
    durations,
    exchange_s,
    gathered,
    network_s,
)
from lt_offload.plan.iteration.memory import host_bytes, lasting_host_bytes
from lt_offload.plan.several import check_cards, gain, one_of
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import Contention, Profile
from tests.support.profiles.fixtures import llama7b_b4
from tests.support.samples import MB, make_profile

MODEL = llama7b_b4(4)
FOUR = replace(MODEL, processes=4)
TOGETHER = replace(FOUR, common_updates=True)
HOSTED = {"planner": "l2l", "delayed": True}


def test_weights_and_states_that_the_host_updates_count_once_on_a_machine() -> None:
    memory = "6GB"
    alone, each = (solve(profile, memory=memory, **HOSTED) for profile in (MODEL, TOGETHER))  # type: ignore[arg-type]
    assert "host" in each.update_places
    trained = [t for t, place in zip(MODEL.tensors, each.update_places, strict=True) if place == "host"]
    frozen = [t for t in MODEL.tensors if not t.trainable]
    shared = sum(t.bytes + t.state_bytes for t in (*trained, *frozen))
    assert each.update_places == alone.update_places
    assert host_bytes(each, MODEL) - host_bytes(each, TOGETHER) == shared - -(-shared // 4)
    assert any("RAM is that of one of 4 processes" in note for note in each.notes)
    assert not any("RAM is that of one" in note for note in alone.notes)


def test_too_little_ram_is_said_for_the_machine() -> None:
    with pytest.raises(InfeasibleError, match="for 4 processes, which have frozen weights and those") as raised:
        solve(TOGETHER, memory="6GB", host_memory=1000)
    alone = lasting_host_bytes(tuple("keep" for _ in FOUR.blocks), (), TOGETHER)  # type: ignore[arg-type]
    assert raised.value.needed_host_bytes is not None
    assert raised.value.needed_host_bytes % 4 == 0
    assert "host_memory=4 kB is too small" in str(raised.value)
    assert raised.value.needed_host_bytes <= 4 * alone


# -- one of several cards ----------------------------------------------------------------------------------------------

MEMORY = 60e9
"""Bytes per second of the host's memory."""


def machine(*, h2d: float = 15e9, d2h: float = 15e9, root: float = 0.0, layers: int = 4) -> Profile:
    """Return the profile of a machine with one card."""
    profile = make_profile(layers=layers, tensors_per_layer=2)
    hardware = replace(
        profile.hardware,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        root_bytes_per_s=root,
        host_memory_bytes_per_s=MEMORY,
        host_bytes=400_000 * MB,
        pinnable_bytes=200_000 * MB,
    )
    optimizer = replace(profile.optimizer, host_bytes_per_s=4e9, host_threads=8, host_speeds={4: 3e9, 8: 4e9})
    shares = Contention(h2d=h2d / MEMORY, d2h=d2h / MEMORY, host=1.0)
    return replace(profile, hardware=hardware, optimizer=optimizer, contention=shares)


def test_links_are_as_fast_as_their_part_of_the_root_and_of_the_memory() -> None:
    assert one_of(machine(), 2).hardware.h2d_bytes_per_s == 15e9, "two take half of the memory"
    assert one_of(machine(root=24e9), 2).hardware.h2d_bytes_per_s == 12e9
    eight = one_of(machine(), 8)
    assert eight.hardware.h2d_bytes_per_s == pytest.approx(MEMORY / 8)
    assert eight.contention.h2d == pytest.approx(1.0)
    assert one_of(machine(root=24e9), 2).contention.h2d == pytest.approx(2 * 12e9 / MEMORY)


def machines(count: int) -> tuple[Profile, Plan]:
    profile = one_of(machine(layers=6), 2, count)
    return profile, plans(profile, Settings(memory=420 * MB, delayed=True, planner="l2l"))


def test_each_machine_receives_the_sums_of_all_others() -> None:
    two, three, four = (replace(machine(), machines=count) for count in (2, 3, 4))
    speed, hop = two.hardware.network_bytes_per_s, two.hardware.network_s
    nbytes = 10 * PART_BYTES
    first = hop + PART_BYTES / speed
    assert between_s(nbytes, two) == pytest.approx(nbytes / speed + 2 * first)
    assert between_s(nbytes, three) == pytest.approx(2 * nbytes / speed + 4 * first)
    assert between_s(nbytes, four) == pytest.approx(3 * nbytes / speed + 6 * first)
    assert between_s(0, three) == between_s(nbytes, machine()) == 0.0


def test_sums_go_between_machines_beside_the_backward() -> None:
    profile, plan = machines(2)
    assert check(plan, profile) == []
    trace = simulate(plan, profile)
    spans = [span for span in trace.spans if span.lane == "network"]
    reduced = [op for op in plan.ops if op.kind == "reduce"]
    assert [span.op for span in spans] == [op.id for op in reduced]
    last = max(span.end for span in trace.spans if span.lane == "compute" and span.label.startswith("backward"))
    assert sum(span.start < last for span in spans) > len(spans) / 2
    updates = {t: span.start for span in trace.spans for t in plan.tensors(plan.ops[span.op]) if "update" in span.label}
    ends = {t: span.end for span in spans for t in plan.tensors(plan.ops[span.op])}
    # Of spans that began in the iteration before the figure shows the latest ones.
    assert all(updates[t] >= ends[t] for t in ends)
    # Where nothing overlaps, an update comes to all of it more.
    alone = [op for op in plan.ops if op.kind != "reduce"]
    assert len(alone) + len(reduced) == len(plan.ops)
    network = network_s(plan, profile)
    single, only = machines(1)
    assert simulate(plan, profile).iteration_time < simulate(only, single).iteration_time + network


def test_windows_send_their_sums_once() -> None:
    profile = one_of(machine(layers=6), 2, 2)
    plan = plans(profile, Settings(memory=420 * MB, delayed=True, planner="l2l", accumulate=3))
    assert check(plan, profile) == []
    reduced = [op.id for op in plan.ops if op.kind == "reduce"]
    assert [span.op for span in simulate(plan, profile).spans if span.lane == "network"] == reduced
    assert {plan.counts[number] for number in reduced} == {1}


def test_the_check_finds_what_would_go_wrong_between_machines() -> None:
    profile, plan = machines(2)

    def changed(change: Callable[[Op], Op]) -> list[str]:
        return check(replace(plan, ops=tuple(change(op) for op in plan.ops)), profile)

    adding = {op.id for op in plan.ops if op.kind == "accumulate" or plan.begins_sums(op)}
    reducing = {op.id for op in plan.ops if op.kind == "reduce"}

    def without(kind: str, left: set[int]) -> Callable[[Op], Op]:
        return lambda op: replace(op, after=tuple(set(op.after) - left)) if op.kind == kind else op

    early = changed(without("reduce", adding))
    assert early
    assert all("(reduce" in said and "it is not ordered after op" in said for said in early)
    late = changed(without("update", reducing))
    assert late
    assert all("(update" in said and "(reduce" in said for said in late)
    other = check(plan, replace(profile, machines=1))
    assert other
    assert all("nothing goes between machines" in said for said in other)
    single, only = machines(1)
    assert any("no op adds its sums up between machines" in said for said in check(only, profile))
    assert check(only, single) == []
    begun = changed(lambda op: replace(op, passes=("beginning",)) if op.kind == "reduce" else op)
    assert any("it belongs to accumulating and beginning passes" in said for said in begun)
    wrong = changed(lambda op: replace(op, bytes=1) if op.kind == "reduce" else op)
    assert wrong
    assert all("bytes: 1 are given" in said for said in wrong)


def test_what_cards_buy_and_what_limits_them() -> None:
    fast, slow = machine(h2d=200e9, d2h=200e9), machine(h2d=2e9, d2h=2e9, root=2e9)
    settings = Settings(memory=420 * MB, planner="l2l")
    found = {}
    for name, profile in {"fast": fast, "slow": slow}.items():
        one = plans(profile, settings)
        four = one_of(profile, 4)
        plan = plans(four, replace(settings, delayed=True))
        found[name] = gain(plan, four, one)
        assert plan.processes == 4
        rate = 4 * plan.batch_size * plan.sequence_length / plan.predicted.iteration_s
        assert found[name].tokens_per_s == plan.tokens_per_s == pytest.approx(rate)
        assert found[name].ram_bytes == 4 * plan.predicted.host_peak_bytes
        rate = four.with_host_threads(plan.host_threads).optimizer.host_bytes_per_s
        places = zip(four.tensors, plan.update_places, strict=True)
        own = sum(gathered(tensor, four) for tensor, place in places if place == "host") / rate
        assert found[name].busy_s["adding gradients"] == pytest.approx(exchange_s(plan, four) + own)
    assert found["slow"].times_one < 2.0
    assert "each more buys little: copies to the device limits" in found["slow"].sentence()
    assert found["slow"].times_one < found["fast"].times_one


def test_where_more_cards_make_the_longest_part_longer_it_says_so() -> None:
    settings = Settings(memory=420 * MB, planner="l2l")
    one, many = machine(), one_of(machine(), 64)
    said = gain(plans(many, replace(settings, hosted=True)), many, plans(one, settings)).sentence()
    assert "the host's memory limits, as each card takes weights from it and brings gradients once" in said
    assert "fewer may be as fast (--sweep shows it)" in said
    nodes = one_of(replace(one, hardware=replace(one.hardware, network_bytes_per_s=1e8)), 1, 2)
    said = gain(plans(nodes, settings), nodes, plans(one, settings)).sentence()
    assert "copies between machines limits, as each machine sends gradients once per update" in said


@pytest.mark.parametrize(
    ("devices", "nodes", "said"), [(0, 1, "devices=0"), (65, 1, "devices=65"), (2, 65, "nodes=65")]
)
def test_numbers_that_cannot_be_planned_are_named(devices: int, nodes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_cards(devices, nodes)


# -- updates that do not wait ------------------------------------------------------------------------------------------

TIGHT = Settings(memory=420 * MB, planner="l2l")


def both_plans(profile: Profile, settings: Settings = TIGHT) -> tuple[Plan, Plan]:
    """Return what is planned, and the plan that waits."""
    return plans(profile, settings), plans(profile, replace(settings, delayed=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_that_do_not_wait_are_faster_and_on_the_host(accumulate: int) -> None:
    profile = one_of(machine(layers=6), 2)
    found, waiting = both_plans(profile, replace(TIGHT, accumulate=accumulate))
    assert not found.delayed
    assert set(found.update_places) <= {"host", "none"}
    assert not any(op.rows is not None or op.writes_gradients for op in found.ops)
    assert check(found, profile) == []
    assert found.predicted.iteration_s < waiting.predicted.iteration_s
    assert found.predicted.iteration_s == pytest.approx(simulate(found, profile).iteration_time)
    assert found.predicted.lower_bound_s <= found.predicted.iteration_s
    assert any("when its gradients are there in all processes" in note for note in found.notes)
    check_beside(found)


def test_an_update_lasts_longer_by_what_its_owner_adds_up() -> None:
    profile = one_of(machine(layers=6), 2)
    found, _ = both_plans(profile)
    timed = profile.with_host_threads(found.host_threads)
    updates = [(op, s) for op, s in zip(found.ops, durations(found, timed), strict=True) if op.kind == "update"]
    assert updates
    for op, seconds in updates:
        tensors = [profile.tensors[t] for t in found.tensors(op)]
        work = sum(tensor.bytes + gathered(tensor, profile) for tensor in tensors)
        assert seconds == op.seconds == pytest.approx(work / timed.optimizer.host_bytes_per_s)
        assert sum(gathered(tensor, profile) for tensor in tensors) > 0


@pytest.mark.parametrize(
    "change", [{"machines": 2}, {"common_updates": False}, {"added_up_first": True}], ids=["machines", "own", "read"]
)
def test_where_that_cannot_be_updates_wait(change: dict[str, object]) -> None:
    profile = replace(one_of(machine(), 2), **change)  # type: ignore[arg-type]
    assert plans(profile, TIGHT).delayed


def test_where_the_host_may_not_update_updates_wait() -> None:
    settings = Settings(memory=2000 * MB, planner="stream", host_update=False)
    assert plans(one_of(machine(), 2), settings).delayed


def test_what_cannot_be_carried_out_is_said() -> None:
    profile = one_of(machine(), 2)
    found, _ = both_plans(profile)
    for options, why in (({"machines": 2}, "several machines"), ({"in_place": False}, "makes new states")):
        with pytest.raises(PlanError, match=why):
            check_beside(found, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="updates weights on the device"):
        check_beside(replace(found, update_places=("device", *found.update_places[1:])))


STAYS = {
    "always": ((), ((1, 12),)),
    "at its uses": (((1, 1), (12, 12)), ((1, 1), (12, 12))),
    "around": (((12, 1),), ((1, 1), (12, 12))),
    "until it is copied": (((1, 13),), ((1, 12),)),
    "until it is copied, around": (((12, 0),), ((12, 12),)),
}
"""Stays of a weight of the second of seven blocks before and after its update has come to the host."""


def test_no_weight_stays_from_its_update_to_its_next_use() -> None:
    profile = machine(layers=5)
    number = next(n for n, tensor in enumerate(profile.tensors) if tensor.blocks == (1,))
    for name, (before, after) in STAYS.items():
        tensors = [TensorDecision(place="device") for _ in profile.tensors]
        stays = tuple(Interval(start=start, end=end) for start, end in before)
        tensors[number] = TensorDecision(place="paged", stays=stays, write_back=13)
        found = hosted(Decisions(tensors=tuple(tensors), options=("keep",) * len(profile.blocks)), profile).tensors[
            number
        ]
        assert (found.place, found.write_back) == ("host", None)
        assert tuple((stay.start, stay.end) for stay in found.stays) == after, name
