"""How long the ops of a plan take on the machine of a profile, each alone on its lane."""

from __future__ import annotations

from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.memory import recomputations
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import Profile, TensorProfile


def durations(plan: Plan, profile: Profile) -> list[float]:
    """Return the seconds of every op of ``plan`` with the speeds of ``profile``, which may be another machine's.

    A computation lasts longer by what it reads in host memory; a backward that writes gradients there lasts longer by
    that, too, noted at the op that says so. What else runs at the same time is left to the simulation.
    """
    computed = iter(computations(plan.options, recomputations(plan), profile))
    found: list[float] = []
    for op in plan.ops:
        if op.computes:
            what = next(computed)
            found.append(what.seconds + what.zero_copy(() if what.idle else plan.zero_copy(op), profile)[1])
        else:
            found.append(_seconds(op, plan, profile))
    return found


def exchange_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds per update in which processes add up their gradients, beside nothing else.

    Measured speeds count, where there are any. The estimates are of bytes that are moved, for N processes and W bytes
    of gradients in each. In host memory, with a copy of everything in each process, a sum is made of copies into and
    out of a buffer (5 W), an exchange of parts and one of sums through sockets, which read and write twice each (8 W
    (N-1)/N), and additions (3 W (N-1)/N), all N times. With one host copy an owner reads N gradients instead of one:
    (N-1) W. Between devices the two exchanges cross each link: 2 W (N-1)/N in both directions.
    """
    machine = profile.hardware
    count = profile.processes
    if count == 1:
        return 0.0
    by_place = {"host": 0, "device": 0}
    for tensor, place in zip(profile.tensors, plan.update_places, strict=True):
        if place != "none":
            by_place["host" if place == "host" else "device"] += tensor.bytes
    others = (count - 1) / count
    moved = (count - 1) if profile.common_updates else count * (5 + 11 * others)
    at_home = machine.exchange_bytes_per_s or machine.host_memory_bytes_per_s / moved
    link = min(machine.h2d_bytes_per_s, machine.d2h_bytes_per_s)
    between = machine.device_exchange_bytes_per_s or link / (2 * others)
    return (by_place["host"] / at_home if at_home else 0.0) + by_place["device"] / between


def added(tensor: TensorProfile) -> float:
    """Return how much of an update, in bytes of parameters, it is to add a gradient of ``tensor`` to a sum.

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
    if op.uses_gradients:
        rate = profile.optimizer.host_bytes_per_s if op.lane == "host" else profile.optimizer.device_bytes_per_s
        tensors = [profile.tensors[tensor] for tensor in plan.tensors(op)]
        updated = sum(tensor.bytes for tensor in tensors) if op.kind == "update" else 0.0
        # A settling update takes the sums as they are: each micro-batch has added its own.
        adds = plan.adds_up and not (plan.delayed and op.kind == "update")
        return (updated + (sum(map(added, tensors)) if adds else 0.0)) / rate
    if op.writes_gradients:
        costs = (profile.tensors[tensor].zero_copy for tensor in plan.tensors(op))
        return sum(cost.grad_s for cost in costs if cost is not None)
    return 0.0
