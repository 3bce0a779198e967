"""The OFFMATE program of the mean pass of a window, for bounds: what gradients, sums and updates cost at least."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pulp

from lt_offload.plan.iteration.durations import accumulated, added
from lt_offload.plan.planners.lp import Pair, add, require
from lt_offload.plan.planners.offmate.model import LinearProgram
from lt_offload.plan.planners.sharing import sharing_rows
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.profile import Profile


class PassProgram(LinearProgram):
    """A program of frozen tensors, with what every plan for windows does for their gradients besides.

    A window of ``A`` passes makes one update of each tensor, on the host or on the device. ``x``, one variable per
    block, is the part of its trained bytes that the host updates. Then every plan does at least this:

    - Each pass copies the gradients of ``x`` to the host. There ``A - 1`` of them are added to the first, and the
      update runs once. For the others the device does the same.
    - In all passes but the first, the sums of the others are on the device in the step that adds to them, and there is
      RAM for the gradients of ``x``, at least those of one block at a time, beside their sums.

    Time and memory of a pass are linear in what it does, so that their mean over the passes of a window satisfies the
    rows if each pass does. When copies, additions and updates run is left open, as those of a pass may run beside the
    next one: the rows of a lane, and those of lanes that share bandwidth, are added up over all steps, which every
    schedule satisfies that satisfies them step by step. Nothing is counted for what a plan may avoid: additions are
    those of the tensor that takes the least, and sums and states never travel.
    """

    def __init__(self, *args: Any, whole: Profile, window: int, **kwargs: Any) -> None:
        """Like a program for ``whole`` with all tensors frozen; ``window``: its passes per update."""
        self._whole, self._window = whole, window
        self._free: defaultdict[LaneName, list[Pair]] = defaultdict(list)
        """By lane: work that may be done in any step."""
        super().__init__(*args, **kwargs)

    def _limit_device(self) -> pulp.LpVariable | None:
        trained: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, tensor in enumerate(self._whole.tensors):
            if tensor.trainable and tensor.bytes:
                trained[tensor.blocks].append(index)
        arriving = self.problem.add_variable("arriving", 0)
        if self._window > 1:
            add(self.host_memory, [(1, arriving)])
        for number, (blocks, tensors) in enumerate(trained.items()):
            self._count_group(f"g{number:03d}", blocks[0], tensors, arriving)
        return super()._limit_device()

    def _count_group(self, name: str, block: int, tensors: list[int], arriving: pulp.LpVariable) -> None:
        """Count the gradients of ``tensors``.

        Args:
            name: of its variables.
            block: the first that uses them, whose backward completes them.
            tensors: all that the same blocks use and that are trained.
            arriving: the most gradients that arrive in RAM in one step.
        """
        trained = [self._whole.tensors[index] for index in tensors]
        share = self.problem.add_variable(f"{name}_X", 0, 1 if self.config.host_update else 0)
        size, once = self._size(sum(tensor.bytes for tensor in trained)), 1 / self._window
        on_host = once + (1 - once) * min(accumulated(tensor, self._whole) / tensor.bytes for tensor in trained)
        on_device = once + (1 - once) * min(added(tensor) / tensor.bytes for tensor in trained)
        self._free["d2h"].append((size / self.d2h_rate, share))
        self._free["host"].append((size * on_host / self.host_rate, share))
        work = size * on_device / self.device_rate
        self._free["compute"] += [(work, 1.0), (-work, share)]
        require(self.problem, [(size, share), (-1, arriving)], "<=")
        room = (1 - once) * size
        # The sum may arrive while the block computes.
        arena = self.arena if self.between is None else self.between.arena
        add(arena[self.timeline.backward(block)], [(room, 1.0), (-room, share)])

    def _limit_times(self) -> list[pulp.LpVariable]:
        times = super()._limit_times()
        direct = any(tensor.zero_copy for tensor in self.profile.tensors)
        alone = [{lane: 1.0} for lane in self._free]
        for factors in (*alone, *sharing_rows(self.profile.contention, direct=direct)):
            free = [(factor * a, x) for lane, factor in factors.items() for a, x in self._free[lane]]
            in_steps = [
                (factor * a, x) for lane, factor in factors.items() for row in self.work.get(lane, ()) for a, x in row
            ]
            require(self.problem, [*free, *in_steps, *((-1, time) for time in times)], "<=")
        return times


def kept_in_ram(profile: Profile, window: int) -> int:
    """Return the bytes of RAM that every plan for windows of ``profile`` needs besides those of a frozen model.

    States, of which several processes may have one copy, and sums: both have a place there wherever they are used.
    """
    part = profile.processes if profile.common_updates else 1
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    sums = sum(tensor.bytes for tensor in trained) if window > 1 else 0
    return sum(tensor.state_bytes for tensor in trained) // part + sums
