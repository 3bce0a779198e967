"""Sets that decisions leave to a schedule: the stays on the device, and the copies to the host after each step.

Nothing here depends on how fast the machine is; see ``work.py`` for that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lt_offload.plan.assembly.copies import CopyGroup, device_copies, in_parts, runs
from lt_offload.plan.assembly.placement import Lifetime, place
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import backward_steps, budget_for, framework_bytes
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
    bytes: int
    """Bytes that are copied."""
    need: int
    """The step of the first use."""
    length: int
    """Steps from the first use to the end of the stay."""
    lead: int = 0
    """Steps by which it may come before its first use."""
    on_host: bool = False
    """True: it waits for an update on the host."""
    is_state: bool = False
    """True: only the update needs it."""
    tensors: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    """Those of ``tensors`` whose weights are copied back to the host."""

    def lifetime(self, steps: int, *, early: bool) -> Lifetime:
        """Return the steps in which it takes room: from its first use on, or ``early``, one step before."""
        # A stay of as many steps as the iteration has leaves no step to come early in.
        start = self.need - (early and self.length < steps - 1)
        return Lifetime(self.room, start % steps, (self.need + self.length) % steps)

    @property
    def priority(self) -> tuple[bool, bool, bool, int]:
        """Order of the stays that are needed in the same step."""
        # Last what is needed last, or may not be there yet: states serve the update, others wait for one on the host.
        return self.group is not None, self.is_state, self.on_host, -self.room


class Sets:
    """The stays and copies to be scheduled; made once per proposal, scheduled for several divisions of the memory."""

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
        return framework_bytes(self.decisions.usage(self.profile), self.profile)

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

    @cached_property
    def tight_arena(self) -> int:
        """The bytes of the arena with which there is a schedule for certain: places for all that has to be there."""
        moving = [stay.lifetime(self.steps, early=False) for stay in self.stays if stay.group is not None]
        return sum(group.room for group in self.always) + place(moving, self.steps).extent

    @property
    def least_room(self) -> int:
        """The device bytes below which there is no schedule, without the bytes that no plan changes."""
        return self.least_arena + self.least_framework

    @property
    def room_needed(self) -> int:
        """The device bytes with which there is a schedule for certain, without the bytes that no plan changes."""
        return self.tight_arena + self.least_framework

    @property
    def device_bytes(self) -> int:
        """The device budget with which there is a schedule for certain."""
        return budget_for(self.room_needed, self.profile)

    @property
    def most_arena(self) -> int:
        """The bytes of the arena with which every stay has a range of its own."""
        return sum(group.room for group in self.always) + sum(stay.room for stay in self.stays if stay.group)

    @property
    def least_framework(self) -> int:
        """The bytes of the framework below which there is none."""
        return int(self.framework.max())

    @property
    def most_arriving(self) -> int:
        """The most bytes of activations of a block that travel."""
        return max((self.offloaded(block) for block in range(len(self.profile.blocks))), default=0)

    @property
    def most_leaving(self) -> int:
        """The most bytes of gradients that leave in one copy."""
        tensors = self.profile.tensors
        copies = (part for parts in self.gradients for part in parts)
        return max((sum(tensors[index].bytes for index in part) for part in copies), default=0)

    def offloaded(self, block: int) -> int:
        """Return the bytes of the activations of ``block`` that travel."""
        return self.decisions.offloaded(block, self.profile)

    def _add_copies(self) -> None:
        decisions = self.decisions
        for group in runs(self.copies, decisions, self.profile):
            if group.stay is None:
                self.always.append(group)
                continue
            copy, need = group.copies[0], group.stay.start
            is_state, tensors = copy.payload == "state", tuple(copy.tensor for copy in group.copies)
            stay = Stay(
                number=len(self.stays),
                group=group,
                block=self.profile.tensors[copy.tensor].blocks[0],
                room=group.room,
                bytes=sum(copy.bytes for copy in group.copies),
                need=need,
                length=(group.stay.end - need) % self.steps,
                on_host=not is_state and decisions.tensors[copy.tensor].place == "host",
                is_state=is_state,
                tensors=tensors,
                written=() if is_state else tuple(t for t in tensors if decisions.tensors[t].write_back is not None),
            )
            self.stays.append(stay)
            for copy in group.copies:
                self.of_tensor[copy.payload, copy.tensor].append(stay)
            # Cyclic: a stay over the end of the iteration is needed in its first steps, too.
            whole, rest = divmod(stay.length + 1, self.steps)
            over = max(stay.need + rest - self.steps, 0)
            self.needed += whole * stay.room
            self.needed[stay.need : stay.need + rest] += stay.room
            self.needed[:over] += stay.room
        for stay in self.stays:
            assert stay.group is not None
            copy = stay.group.copies[0]
            ends = [(other.need + other.length) % self.steps for other in self.of_tensor[copy.payload, copy.tensor]]
            if stay.on_host:  # what came before the update would be outdated
                ends.append(self.update_step[copy.tensor])
            stay.lead = min((stay.need - end) % self.steps or self.steps for end in ends) - 1

    def _add_activations(self) -> None:
        for block in range(len(self.profile.blocks)):
            nbytes = self.offloaded(block)
            if not nbytes:
                continue
            need = self.decisions.activations_needed(block, self.profile)
            self.stays.append(
                Stay(
                    number=len(self.stays),
                    group=None,
                    block=block,
                    room=nbytes,
                    bytes=nbytes,
                    need=need,
                    length=0,
                    # It cannot return in the step in which it leaves.
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
            if decision.place == "paged" and profile.tensors[index].state_bytes:
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
