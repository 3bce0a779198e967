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
