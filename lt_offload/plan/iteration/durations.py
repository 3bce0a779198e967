"""Durations of a plan's ops on the machine of a profile, each alone on its lane."""

from __future__ import annotations

from dataclasses import replace

from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.memory import recomputations
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import Profile, TensorProfile, ZeroCopyProfile

PART_BYTES = 1 << 20
"""Bytes of one message over the network, see ``distributed/sums.py``."""


def computations_of(plan: Plan, profile: Profile) -> dict[int, Computation]:
    """Return the computations of ``plan`` by the ids of their ops."""
    ops = (op.id for op in plan.ops if op.computes)
    return dict(zip(ops, computations(plan.options, recomputations(plan), profile), strict=True))


def durations(plan: Plan, profile: Profile) -> list[float]:
    """Return the seconds of every op of ``plan`` with the speeds of ``profile``, which may be another machine's.

    A computation lasts longer by what it reads in host memory; a backward that writes gradients there lasts longer by
    that, too, noted at the op that says so. What else runs at the same time is left to the simulation.
    """
    run = computations_of(plan, profile)
    seconds: list[float] = []
    for op in plan.ops:
        if op.computes:
            what = run[op.id]
            seconds.append(what.seconds + what.zero_copy(() if what.idle else plan.zero_copy(op), profile)[1])
        else:
            seconds.append(_seconds(op, plan, profile))
    return seconds


def timed(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan`` with the durations of its ops on the machine of ``profile``, with the plan's threads there."""
    seconds = durations(plan, profile.with_host_threads(plan.host_threads))
    return replace(plan, ops=tuple(replace(op, seconds=s) for op, s in zip(plan.ops, seconds, strict=True)))


def exchange_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds per update in which processes add up gradients when all are there, beside nothing else.

    Measured speeds count, where there are any. The estimates are of bytes that are moved, for N processes and W bytes
    of gradients in each. In host memory, with a copy of everything in each process, a sum is made of copies into and
    out of a buffer (5 W), an exchange of parts and one of sums through sockets, which read and write twice each (8 W
    (N-1)/N), and additions (3 W (N-1)/N), all N times. With one host copy owners add up in their updates, see
    :func:`gathered`, or before them, if somebody reads gradients or their norm: then an owner reads N sums, writes one,
    and copies it to N-1 places, (3 N - 1) W; with several machines in ops of the network's lane, which are not counted
    here. Where a plan has none, N sums are added to what comes, and the result is written to N places, 3 N W in all.
    Between devices the two exchanges cross each link: 2 W (N-1)/N in both directions. Between machines see
    :func:`between_s`.
    """
    machine, count = profile.hardware, profile.processes
    if count * profile.machines == 1:
        return 0.0
    by_place, memory = _at_the_end(plan, profile), machine.host_memory_bytes_per_s
    others = (count - 1) / count
    moved = count * (5 + 11 * others)
    if profile.common_updates:
        moved = 3 * count if profile.machines > 1 else 0
    seconds = between_s(sum(by_place.values()), profile)
    if moved and machine.exchange_bytes_per_s and not profile.common_updates:
        seconds += by_place["host"] / machine.exchange_bytes_per_s
    elif memory:
        seconds += moved * by_place["host"] / memory
    # A plan for one micro-batch that has no room for sums is one whose updates do not wait.
    waits = plan.delayed or any(tensor.sum_bytes for tensor in profile.tensors)
    if _owners_alone(profile) and profile.added_up_first and waits:
        places = zip(profile.tensors, plan.update_places, strict=True)
        owned = sum(added(tensor) for tensor, place in places if place == "host")
        seconds += owned * (3 * count - 1) / 3 / profile.optimizer.host_bytes_per_s
    if count > 1:
        link = min(machine.h2d_bytes_per_s, machine.d2h_bytes_per_s)
        seconds += by_place["device"] / (machine.device_exchange_bytes_per_s or link / (2 * others))
    return seconds


def network_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds per update in which gradients are on the network, each exchange alone."""
    between = sum(between_s(op.bytes, profile) for op in plan.ops if op.kind == "reduce")
    return between + between_s(sum(_at_the_end(plan, profile).values()), profile)


def between_s(nbytes: int, profile: Profile) -> float:
    """Return the seconds in which gradients of W bytes are added up over the network, beside nothing else.

    In parts, each of M machines adds its own in turn, and broadcasts the sum. So each receives M-1 times W over its
    network card, of B bytes per second in each direction: (M-1) W/B. The first part takes 2 (M-1) hops.
    """
    machine, more = profile.hardware, profile.machines - 1
    if not more or not nbytes:
        return 0.0
    speed = machine.network_bytes_per_s
    hops = 2 * more * (machine.network_s + min(PART_BYTES, nbytes) / speed)
    return more * nbytes / speed + hops


def norm_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds per update in which the norm of all gradients is found, beside nothing else.

    Updates that wait, wait for that. Each sum is read once, where the last gradient makes it complete: a third of what
    it takes to add to it. A sum of one gradient is read on the device, before that leaves. Updates of several processes
    wait for each other without a norm, too.
    """
    several = profile.processes * profile.machines > 1
    if not plan.delayed or (several and not profile.added_up_first):
        return 0.0
    seconds = 0.0
    on_host = plan.window > 1 or several
    for tensor, place in zip(profile.tensors, plan.update_places, strict=True):
        if place == "host" and on_host:
            seconds += accumulated(tensor, profile) / profile.optimizer.host_bytes_per_s
        elif place != "none":
            seconds += added(tensor) / profile.optimizer.device_bytes_per_s
    return seconds / 3


def _at_the_end(plan: Plan, profile: Profile) -> dict[str, int]:
    """Return the bytes of gradients for updates on the host and on the device that no op of the plan adds up before."""
    waiting = {"host": 0, "device": 0}
    before = {t for op in plan.ops if op.kind == "reduce" for t in plan.tensors(op)}
    for index, (tensor, place) in enumerate(zip(profile.tensors, plan.update_places, strict=True)):
        if place != "none" and index not in before:
            waiting["host" if place == "host" else "device"] += tensor.bytes
    return waiting


def accumulated(tensor: TensorProfile, profile: Profile) -> float:
    """Return the cost of adding a gradient of ``tensor`` to a process's own sum, as bytes of an update on the host.

    Each adds all of its gradients, while of updates each does its part where they have one host copy.
    """
    return added(tensor) * (profile.processes if profile.common_updates else 1)


def gathered(tensor: TensorProfile, profile: Profile) -> float:
    """Return the cost of an owner's adding up the sums of all processes, as bytes of an update on the host.

    It reads N of them and writes one, for the update to read: N + 1 accesses, where adding one gradient has 3.
    """
    several = _owners_alone(profile) and not profile.added_up_first
    return added(tensor) * (profile.processes + 1) / 3 if several else 0.0


def _owners_alone(profile: Profile) -> bool:
    """Return whether owners on one machine have all sums for their updates before them."""
    return profile.common_updates and profile.processes > 1 and profile.machines == 1


def added(tensor: TensorProfile) -> float:
    """Return the cost of adding a gradient of ``tensor`` to a sum, as bytes of parameters that are updated.

    Both are as fast as memory: the update reads the gradient, and reads and writes the parameter and its states.
    """
    if not tensor.bytes:
        return 0.0
    return tensor.bytes * 3 / (3 + 2 * tensor.state_bytes / tensor.bytes)


def _seconds(op: Op, plan: Plan, profile: Profile) -> float:
    if op.lane == "h2d":
        return op.bytes / profile.hardware.h2d_bytes_per_s
    if op.lane == "d2h":
        return op.bytes / profile.hardware.d2h_bytes_per_s
    if op.kind == "reduce":
        memory = profile.hardware.host_memory_bytes_per_s
        adding = 3 * profile.processes * op.bytes / memory if memory else 0.0  # a measured network has added, too
        return between_s(op.bytes, profile) + adding
    if op.uses_gradients:
        rate = profile.optimizer.host_bytes_per_s if op.lane == "host" else profile.optimizer.device_bytes_per_s
        tensors = [profile.tensors[tensor] for tensor in plan.tensors(op)]
        if op.rows == "looked up":  # both gradients are added, then these rows are updated
            return sum(tensor.lookup_bytes / tensor.bytes * (tensor.bytes + added(tensor)) for tensor in tensors) / rate
        updated = sum(tensor.bytes for tensor in tensors) if op.kind == "update" else 0.0
        # A settling update takes the sums as they are: each micro-batch has added its own.
        settling = plan.delayed and op.kind == "update"
        if plan.adds_up and not settling:
            updated += sum(accumulated(t, profile) if op.lane == "host" else added(t) for t in tensors)
        if op.kind == "update" and op.lane == "host":  # profiles with sums have this in their speed
            updated += sum(gathered(tensor, profile) for tensor in tensors if not tensor.sum_bytes)
        return updated / rate
    if op.writes_gradients:
        costs = (profile.tensors[tensor].zero_copy for tensor in plan.tensors(op))
        return sum(cost.grad_s for cost in costs if cost is not None)
    return 0.0


def least_computing_s(profile: Profile) -> float:
    """Return the seconds of the computations of an iteration, each block with its fastest option."""
    return sum(min(o.forward_s + block.has_backward * o.backward_s for o in block.options) for block in profile.blocks)


def slowed(
    profile: Profile,
    *,
    compute: float = 1.0,
    h2d: float = 1.0,
    d2h: float = 1.0,
    host: float = 1.0,
    device: float = 1.0,
) -> Profile:
    """Return ``profile`` with computations, copies, and updates on the host and on the device so many times slower."""
    machine, optimizer, blocks = profile.hardware, profile.optimizer, profile.blocks
    if compute != 1:
        blocks = tuple(
            replace(
                block,
                options=tuple(
                    replace(o, forward_s=o.forward_s * compute, backward_s=o.backward_s * compute)
                    for o in block.options
                ),
            )
            for block in blocks
        )
    return replace(
        profile,
        blocks=blocks,
        hardware=replace(
            machine, h2d_bytes_per_s=machine.h2d_bytes_per_s / h2d, d2h_bytes_per_s=machine.d2h_bytes_per_s / d2h
        ),
        optimizer=replace(
            optimizer,
            host_bytes_per_s=optimizer.host_bytes_per_s / host,
            host_speeds={threads: speed / host for threads, speed in optimizer.host_speeds.items()},
            device_bytes_per_s=optimizer.device_bytes_per_s / device,
        ),
    )


def with_faster_link(profile: Profile, factor: float) -> Profile:
    """Return ``profile`` with copies, and reads and writes of host memory by the device, ``factor`` times as fast."""
    machine = profile.hardware
    faster = replace(
        machine, h2d_bytes_per_s=factor * machine.h2d_bytes_per_s, d2h_bytes_per_s=factor * machine.d2h_bytes_per_s
    )
    return replace(profile, hardware=faster, tensors=tuple(_read_faster(tensor, factor) for tensor in profile.tensors))


def _read_faster(tensor: TensorProfile, factor: float) -> TensorProfile:
    if tensor.zero_copy is None:
        return tensor
    reads = tuple(
        replace(read, forward_s=read.forward_s / factor, backward_s=read.backward_s / factor)
        for read in tensor.zero_copy.reads
    )
    return replace(tensor, zero_copy=ZeroCopyProfile(reads=reads, grad_s=tensor.zero_copy.grad_s / factor))
