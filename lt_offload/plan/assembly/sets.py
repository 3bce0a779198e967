"""What decisions leave to a schedule: which stays there are on the device, what leaves, what every step computes.

Only the *sets* of the decisions count: which weights stay through which gap between two uses, which states travel, who
updates what, what happens to activations. Their times are given anew.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.assembly.copies import device_copies, in_parts
from lt_offload.plan.assembly.groups import CopyGroup, runs
from lt_offload.plan.assembly.placement import Lifetime, place
from lt_offload.plan.iteration.computations import computations
from lt_offload.plan.iteration.decisions import Decisions, copy_uses
from lt_offload.plan.iteration.memory import backward_steps, framework_bytes
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.profile import Profile

_LONG = 6
"""Stays of at least so many steps after their first use have a place before all others."""
_LARGEST = 0.1
"""And the largest buffers, as far as they make up less than this part of all bytes."""


@dataclass(slots=True, eq=False)
class Stay:
    """Copies side by side, or activations, from their arrival to the end of a stay; once per iteration."""

    number: int
    group: CopyGroup | None
    """None: the activations of ``block``."""
    block: int
    room: int
    seconds: float
    """For the link."""
    need: int
    """The step of the first use."""
    length: int
    """Steps from the first use to the end of the stay."""
    lead: int = 0
    """Steps by which it may come before its first use."""
    on_host: bool = False
    """Whether it waits for an update on the host."""

    @property
    def is_state(self) -> bool:
        """Whether it is needed by the update only."""
        return self.group is not None and self.group.copies[0].payload == "state"

    def lifetime(self, steps: int, *, early: bool) -> Lifetime:
        """Return when it takes room: from its first use on, or ``early``, one step before."""
        start = self.need - (early and self.length < steps - 1)
        return Lifetime(self.room, start % steps, (self.need + self.length) % steps)

    @property
    def priority(self) -> tuple[bool, bool, bool, int]:
        """Orders what is needed in the same step."""
        return self.group is not None, self.is_state, self.on_host, -self.room


class Sets:
    """What decisions leave to be scheduled; prepared once, scheduled for several divisions of the memory."""

    def __init__(self, decisions: Decisions, profile: Profile) -> None:
        self.decisions, self.profile = decisions, profile
        self.timeline = timeline(profile)
        self.steps = len(self.timeline)
        self.copies = device_copies(decisions, profile)
        self.update_step = {
            index: backward_steps(tensor.blocks, profile)[-1]
            for index, tensor in enumerate(profile.tensors)
            if tensor.trainable
        }
        self.seconds = [0.0] * self.steps
        """Per step: of its computations and of the updates on the device. That launches may last longer is left to the
        simulation."""
        self.reads = [0.0] * self.steps
        """Per step: for how long what computations read in host memory occupies the link."""
        self._add_computations()
        self.always: list[CopyGroup] = []
        self.stays: list[Stay] = []
        self.of_tensor: dict[tuple[str, int], list[Stay]] = defaultdict(list)
        self.needed: NDArray[np.int64] = np.zeros(self.steps, dtype=np.int64)
        """Per step: arena bytes that have to be there."""
        self._add_copies()
        self._add_activations()
        self.by_need: list[list[Stay]] = [[] for _ in range(self.steps)]
        self.ending: list[list[Stay]] = [[] for _ in range(self.steps)]
        for stay in self.stays:
            self.by_need[stay.need].append(stay)
            if stay.group is not None:
                self.ending[(stay.need + stay.length) % self.steps].append(stay)
        for stays in self.by_need:
            stays.sort(key=lambda stay: stay.priority)
        self.direct: list[list[int]] = [[] for _ in range(self.steps)]
        self.gradients: list[list[list[int]]] = [[] for _ in range(self.steps)]
        self.written: list[list[int]] = [[] for _ in range(self.steps)]
        self.write_backs: list[list[list[int]]] = [[] for _ in range(self.steps)]
        self.state_offloads: list[list[list[int]]] = [[] for _ in range(self.steps)]
        self._add_departures()

    @cached_property
    def framework(self) -> NDArray[np.int64]:
        """Per step: bytes of the framework if everything leaves at once and comes at the last moment."""
        used = self.decisions.usage
        at_once = replace(
            used,
            grad_release_after={t: self.update_step[t] for t in used.grad_release_after},
            left={block: self.timeline.forward(block) for block in used.left},
            fetched={stay.block: stay.need for stay in self.stays if stay.group is None},
        )
        return framework_bytes(at_once, self.profile)

    @property
    def unwieldy(self) -> frozenset[int]:
        """The long stays and the largest buffers."""
        copies = [stay for stay in self.stays if stay.group is not None]
        rooms = sorted(stay.room for stay in copies)
        large = rooms[int(np.searchsorted(np.cumsum(rooms), (1 - _LARGEST) * sum(rooms)))] if rooms else 0
        return frozenset(stay.number for stay in copies if stay.length >= _LONG or stay.room > large)

    def covering(self, step: int) -> frozenset[int]:
        """Return the stays that have to be there in ``step``."""
        return frozenset(
            stay.number
            for stay in self.stays
            if stay.group is not None and (step - stay.need) % self.steps <= stay.length
        )

    @property
    def least_arena(self) -> int:
        """The bytes of the arena below which there is no schedule."""
        return sum(group.room for group in self.always) + int(self.needed.max())

    @property
    def tight_arena(self) -> int:
        """The bytes of the arena with which there is a schedule for certain: places for all that has to be there."""
        moving = [stay.lifetime(self.steps, early=False) for stay in self.stays if stay.group is not None]
        return sum(group.room for group in self.always) + place(moving, self.steps).extent

    @property
    def least_room(self) -> int:
        """The device bytes below which there is no schedule, besides those that no plan changes."""
        return self.least_arena + self.least_framework

    @property
    def room_needed(self) -> int:
        """The device bytes with which there is a schedule for certain, besides those that no plan changes."""
        return self.tight_arena + self.least_framework

    @property
    def most_arena(self) -> int:
        """The bytes of the arena with which every stay has a range of its own."""
        return sum(group.room for group in self.always) + sum(stay.room for stay in self.stays if stay.group)

    @property
    def least_framework(self) -> int:
        """The bytes of the framework below which there is none."""
        return int(self.framework.max())

    @property
    def least_s(self) -> float:
        """No schedule is shorter: the time of the lane with the most work, or of what all need of what they share."""
        shares, busy_s = self.profile.contention, self.busy_s
        shared = zip((shares.compute, shares.h2d, shares.d2h, shares.host), busy_s, strict=True)
        return max(*busy_s, sum(share * seconds for share, seconds in shared))

    @property
    def busy_s(self) -> tuple[float, float, float, float]:
        """The seconds of work of each lane, alone: computations, copies to the device, to the host, updates there."""
        profile = self.profile
        out = sum(self.offloaded(block) for block in range(len(profile.blocks)))
        for parts in (*self.gradients, *self.write_backs, self.written):
            out += sum(profile.tensors[t].bytes for tensors in parts for t in tensors)
        for parts in self.state_offloads:
            out += sum(profile.tensors[t].state_bytes for tensors in parts for t in tensors)
        on_host = sum(
            tensor.bytes
            for tensor, decision in zip(profile.tensors, self.decisions.tensors, strict=True)
            if decision.place == "host"
        )
        return (
            sum(self.seconds),
            sum(self.reads) + sum(stay.seconds for stay in self.stays),
            out / profile.hardware.d2h_bytes_per_s,
            on_host / profile.optimizer.host_bytes_per_s,
        )

    def offloaded(self, block: int) -> int:
        """Return the bytes of the activations of ``block`` that travel."""
        decision = self.decisions.blocks[block]
        return 0 if decision.release_after is None else self.profile.blocks[block].option(decision.option).offload_bytes

    def _add_computations(self) -> None:
        profile, decisions, found = self.profile, self.decisions, self.seconds
        direct: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, decision in enumerate(decisions.tensors):
            for step in decision.zero_copy:
                for block in profile.tensors[index].blocks:
                    direct[step, block].append(index)
        for computation in computations(
            [block.option for block in decisions.blocks], decisions.recomputations, profile
        ):
            tensors = [] if computation.idle else direct[computation.step, computation.block]
            nbytes, longer = computation.zero_copy(tensors, profile)
            found[computation.step] += computation.seconds + longer
            self.reads[computation.step] += nbytes / profile.hardware.h2d_bytes_per_s
        for index, step in self.update_step.items():
            tensor, decision = profile.tensors[index], decisions.tensors[index]
            if decision.place in ("device", "paged"):
                found[step] += tensor.bytes / profile.optimizer.device_bytes_per_s
            elif decision.grad_zero_copy and tensor.zero_copy is not None:
                found[step] += tensor.zero_copy.grad_s

    def _add_copies(self) -> None:
        decisions, rate = self.decisions, self.profile.hardware.h2d_bytes_per_s
        for group in runs(self.copies, decisions, self.profile):
            if group.interval is None:
                self.always.append(group)
                continue
            copy, origin = group.copies[0], group.interval.start
            decision = decisions.tensors[copy.tensor]
            end = (group.interval.end - origin) % self.steps
            weight = copy.payload == "weight"
            uses = copy_uses(copy.tensor, decisions, self.profile) if weight else [self.update_step[copy.tensor]]
            inside = sorted(since for use in uses if (since := (use - origin) % self.steps) <= end)
            last = inside[-1]
            if weight and decision.write_back is not None and (decision.write_back - origin) % self.steps <= end:
                last = max(last, (decision.write_back - origin) % self.steps)
            stay = Stay(
                number=len(self.stays),
                group=group,
                block=self.profile.tensors[copy.tensor].blocks[0],
                room=group.room,
                seconds=sum(copy.bytes for copy in group.copies) / rate,
                need=(origin + inside[0]) % self.steps,
                length=last - inside[0],
                on_host=weight and decision.place == "host",
            )
            self.stays.append(stay)
            for copy in group.copies:
                self.of_tensor[copy.payload, copy.tensor].append(stay)
            for since in range(stay.length + 1):
                self.needed[(stay.need + since) % self.steps] += stay.room
        for stay in self.stays:
            assert stay.group is not None
            copy = stay.group.copies[0]
            ends = [(other.need + other.length) % self.steps for other in self.of_tensor[copy.payload, copy.tensor]]
            if stay.on_host:  # what came before the update would be outdated
                ends.append(self.update_step[copy.tensor])
            stay.lead = min((stay.need - end) % self.steps or self.steps for end in ends) - 1

    def _add_activations(self) -> None:
        for block, decision in enumerate(self.decisions.blocks):
            if decision.release_after is None:
                continue
            nbytes = self.offloaded(block)
            need = self.decisions.activations_needed(block, self.profile)
            self.stays.append(
                Stay(
                    number=len(self.stays),
                    group=None,
                    block=block,
                    room=nbytes,
                    seconds=nbytes / self.profile.hardware.h2d_bytes_per_s,
                    need=need,
                    length=0,
                    lead=need - self.timeline.forward(block) - 1,
                )
            )

    def _add_departures(self) -> None:
        profile = self.profile
        gradients: dict[int, list[int]] = defaultdict(list)
        back: dict[tuple[int, int], list[int]] = defaultdict(list)
        states: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, decision in enumerate(self.decisions.tensors):
            for step in decision.zero_copy:
                self.direct[step].append(index)
            if decision.write_back is not None:
                back[decision.write_back, profile.tensors[index].blocks[0]].append(index)
            if decision.place == "paged" and decision.state_interval is not None:
                states[self.update_step[index], profile.tensors[index].blocks[0]].append(index)
            if decision.place == "host":
                step = self.update_step[index]
                if decision.grad_zero_copy:
                    self.written[step].append(index)
                else:
                    gradients[step].append(index)
        for step, tensors in gradients.items():
            self.gradients[step] = in_parts(tensors, profile)
        for (step, _), tensors in sorted(back.items()):
            self.write_backs[step] += in_parts(tensors, profile)
        for (step, _), tensors in sorted(states.items()):
            self.state_offloads[step] += in_parts(tensors, profile)
