"""What updates would gain that do not wait for the norm, where old values are kept in case it asks for clipping.

Nothing of it is built: this is why. A plan for one batch per update is changed on paper and simulated, as if the norm
never asked for clipping. Updates on the host begin when their gradients arrive, and old values have to be kept, in RAM:

- *copied aside* just before the update, which is more work for the memory that makes updates on the host slow, or
- *written elsewhere*: new values go into a second set of memory, and the two take turns. That is no more work, but
  parameters and optimizer states would move with every update, and users hold them.

Where a share of the updates on the host is early, the others, and those on the device, wait as today.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

from lt_offload import Profile, simulate
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.iteration.durations import durations
from lt_offload.plan.verify import simulate as simulation
from lt_offload.schema.plan import Op, Plan

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the updates on the host, by their time, that do not wait: those of the last blocks, whose gradients come first."""
SLOWER = (1.0, 2.0, 4.0)
"""How many times as slow the host is taken for where a plan without waiting is made: the more, the less it updates."""


@dataclass(frozen=True, slots=True)
class Early:
    """A plan on paper."""

    seconds: float
    """Of an update, as simulated."""
    ram: int
    """Bytes that old values take; gradients are kept where updates wait, too."""


def aside(profile: Profile) -> float:
    """Return how many times as long an update on the host takes that copies old values aside.

    It reads the gradient, and reads and writes the parameter and its states; a copy reads and writes these once more.
    """
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    states = sum(tensor.state_bytes for tensor in trained) / sum(tensor.bytes for tensor in trained)
    return 1 + 2 * (1 + states) / (3 + 2 * states)


def host_early(plan: Plan, profile: Profile, share: float, slower: float) -> Early:
    """Return ``plan``, whose updates wait, with a ``share`` of those on the host that do not.

    Args:
        plan: for one micro-batch per update.
        profile: what it was made for.
        share: of the time of these updates.
        slower: how many times as long they take.
    """
    assert plan.delayed
    assert plan.window == 1
    ops = list(plan.ops)
    on_host = [op for op in ops if op.updates_on_host]
    total = sum(op.seconds for op in on_host)
    complete = {op.id for op in ops if op.kind == "accumulate" or plan.begins_sums(op)}
    early: set[int] = set()
    taken, ram = 0.0, 0
    for op in on_host:
        taken += op.seconds
        if taken > share * total * (1 + 1e-9):
            break
        early.add(op.id)
        tensors = plan.tensors(op)
        ram += sum(profile.tensors[t].bytes + profile.tensors[t].state_bytes for t in tensors)
        own = {other for other in complete if not set(tensors).isdisjoint(plan.tensors(ops[other]))}
        after = tuple(sorted((set(op.after) - complete) | own))
        ops[op.id] = replace(op, after=after, seconds=op.seconds * slower)
    programs = dict(plan.programs)
    programs["beginning"] = tuple(sorted({*programs["beginning"], *early}))
    programs["settling"] = tuple(number for number in programs["settling"] if number not in early)
    return Early(_simulated(replace(plan, ops=tuple(ops), programs=programs), profile), ram)


def all_early(plan: Plan, profile: Profile, slower: float) -> Early:
    """Return ``plan``, whose updates do not wait, with old values that are copied aside.

    The device's updates, too: before their results come back to the host, the host copies what is there, and gradients
    leave as well. Of what stays on the device for good nothing is counted: its updates could wait at little cost.

    Args:
        plan: for one micro-batch per update.
        profile: the machine.
        slower: how many times as long updates on the host take.
    """
    seconds = durations(plan, profile.with_host_threads(plan.host_threads))
    hardware = profile.hardware
    by_device = {t for op in plan.ops if op.kind == "update" and op.lane != "host" for t in plan.tensors(op)}
    number: dict[int, int] = {}
    ops: list[Op] = []
    for op in plan.ops:
        took, after = seconds[op.id], {number[other] for other in op.after if other < op.id}
        later = {other for other in op.after if other >= op.id}
        if op.updates_on_host:
            took *= slower
        elif op.kind == "offload" and op.payload in ("weight", "state") and by_device & set(plan.tensors(op)):
            copying = 2 * op.bytes / hardware.host_memory_bytes_per_s
            kept = Op(id=len(ops), kind="accumulate", step=op.step, block=op.block, lane="host", seconds=copying)
            ops.append(kept)
            after.add(kept.id)
            if op.payload == "state":
                took += sum(profile.tensors[t].bytes for t in plan.tensors(op)) / hardware.d2h_bytes_per_s
        number[op.id] = len(ops)
        # Ops of the iteration before are numbered when all are.
        ops.append(replace(op, id=len(ops), seconds=took, after=(*after, *(-1 - other for other in later))))
    linked = (replace(op, after=tuple(sorted(n if n >= 0 else number[-1 - n] for n in op.after))) for op in ops)
    changed = replace(plan, ops=tuple(linked), programs={"updating": tuple(range(len(ops)))})
    places = zip(profile.tensors, plan.update_places, strict=True)
    ram = sum(tensor.bytes + tensor.state_bytes for tensor, place in places if place in ("host", "paged"))
    return Early(_simulated(changed, profile), ram)


def best(found: Iterator[Early]) -> Early:
    """Return the fastest, and of those within 1 % of it the one with the least RAM."""
    plans = list(found)
    least = min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= 1.01 * least), key=lambda plan: plan.ram)


def figures(profile: Profile, waiting: Plan, settings: Settings) -> dict[str, Early]:
    """Return what updates that do not wait would take, by what is done.

    Args:
        profile: of the model.
        waiting: its plan whose updates wait, for one micro-batch per update.
        settings: of that plan.
    """
    copied = aside(profile)
    free = [_made(profile, replace(settings, delayed=False), slower) for slower in SLOWER]
    return {
        "host, copied aside": best(host_early(waiting, profile, share, copied) for share in SHARES),
        "host, written elsewhere": best(host_early(waiting, profile, share, 1.0) for share in SHARES),
        "all, copied aside": best(all_early(plan, profile, copied) for plan in free),
    }


def _made(profile: Profile, settings: Settings, slower: float) -> Plan:
    optimizer = profile.optimizer
    speeds = {threads: speed / slower for threads, speed in optimizer.host_speeds.items()}
    optimizer = replace(optimizer, host_bytes_per_s=optimizer.host_bytes_per_s / slower, host_speeds=speeds)
    return make_plan(replace(profile, optimizer=optimizer), settings)


def _simulated(plan: Plan, profile: Profile) -> float:
    """Return the seconds of an iteration whose ops last as long as they say."""

    def said(plan: Plan, _: Profile) -> list[float]:
        return [op.seconds for op in plan.ops]

    with patch.object(simulation, "durations", said):
        return simulate(plan, profile).iteration_time
