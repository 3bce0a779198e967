"""Times and places for decisions: every copy just in time, as memory and links allow.

Decisions are sets: weights that stay through a gap between two uses, states that travel, places of updates, options of
activations. A walk through an iteration with a clock finds when copies start. Copies to the device are queued in the
order of need. One is started as soon as the link would be idle otherwise, if there is room for it in every step until
its use; a computation starts as soon as its weights and activations have arrived and the memory that it takes is free.
Space needed later is reserved from the start, so a prefetch can never crowd out something the plan requires.

The arena is filled on the way: a copy goes to a range that is free, the one that has been free for longest, and waits
for the copy to the host that empties it, if there is one. Long stays and large buffers have their places before all
others. What is on the device at the end of an iteration has to lie where it lay at its beginning: the first iteration
says where, the second one, which is the result, keeps to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lt_offload.plan.assembly.copies import CopyGroup, DeviceCopy
from lt_offload.plan.assembly.placement import place
from lt_offload.plan.assembly.ranges import ArenaRanges, Key, Policy, Reserved
from lt_offload.plan.assembly.sets import Stay
from lt_offload.plan.assembly.timetable import ActivationTimes, Timetable
from lt_offload.plan.assembly.work import HostUpdate, LaneWork
from lt_offload.schema.plan import ALIGNMENT

_ITERATIONS = 2
_AHEAD = 12
"""Steps of which the needs are looked at."""
_REPAIRS = 4
"""Attempts; in each further one, the stays of a crowded step get their places before all others, too."""


@dataclass(slots=True, eq=False)
class _WaitingUpdate:
    """An update on the host that has not begun."""

    ready: float
    deadline: int
    seconds: float
    tensors: list[int]


@dataclass(slots=True)
class _Departure:
    """Framework memory that is copied to the host."""

    until: float
    bytes: int
    step: int


def schedule(
    work: LaneWork,
    arena_bytes: int,
    framework: int,
    *,
    part: float = 1.0,
    policy: Policy = "oldest",
    beat_s: float = math.inf,
) -> Timetable | None:
    """Return times and places within these bytes; None if none were found.

    Args:
        work: what is to be scheduled.
        arena_bytes: of the arena.
        framework: bytes of the framework.
        part: of the arena, what copies ahead of their use may fill; less leaves room where buffers do not fit together.
        policy: where buffers go.
        beat_s: one that takes so long or longer is of no use: it is given up as soon as that is certain.
    """
    sets = work.sets
    placed = sets.unwieldy
    for repair in range(_REPAIRS):
        # What is placed has time to come, as long as nothing is crowded.
        run = _ScheduleRun(work, arena_bytes, framework, part, policy, placed, early=not repair)
        run.beat_s = beat_s
        timetable = run.run()
        if timetable is not None:
            return timetable
        crowd = sets.covering(run.stuck) if run.stuck is not None else placed
        if crowd <= placed:
            return None
        placed = placed | crowd
    return None


def schedule_in_place(work: LaneWork, arena_bytes: int, framework: int) -> Timetable:
    """Return times with a place for everything before anything is scheduled, though there be no room to come early.

    Always possible with ``Sets.tight_arena`` bytes of arena and ``Sets.least_framework`` of the framework.
    """
    everything = frozenset(stay.number for stay in work.sets.stays if stay.group is not None)
    timetable = _ScheduleRun(work, arena_bytes, framework, 1.0, "oldest", everything, early=False).run()
    assert timetable is not None
    return timetable


class _ScheduleRun:
    """One walk through the iterations. Steps are counted on from iteration to iteration."""

    def __init__(
        self,
        work: LaneWork,
        arena_bytes: int,
        framework: int,
        part: float,
        policy: Policy,
        placed: frozenset[int],
        *,
        early: bool,
    ) -> None:
        sets = work.sets
        self.placed = [stay for stay in sets.stays if stay.number in placed]
        """The stays that have a place before all others."""
        self.early = early
        """True: these have their places one step before their first use already."""
        self.stuck: int | None = None
        """The step in which something had no place, if that ended the run."""
        self.work, self.sets, self.profile, self.steps = work, sets, work.profile, sets.steps
        always = sum(group.room for group in sets.always)
        moving = (arena_bytes - always) // ALIGNMENT * ALIGNMENT
        self.always, self.moving, self.limit, self.framework = always, moving, part * moving, framework
        self.end = _ITERATIONS * self.steps
        self.ranges = ArenaRanges(moving, policy)
        turns = _ITERATIONS + 2
        self.arena = [int(nbytes) for nbytes in sets.needed] * turns
        """Per step: arena bytes of copies that have to be there, and of copies that came before their first use."""
        self.taken = [int(nbytes) for nbytes in sets.framework] * turns
        """The same of the framework, whose early copies are activations."""
        self.link = self.back = self.host = 0.0
        """Times at which the queued copies to the device, copies to the host and updates on the host are done."""
        self.current: dict[int, float] = {}
        """Time at which each tensor's host copy is current."""
        self.states_out: dict[int, float] = {}
        self.activations_out: dict[int, float] = {}
        self.updates: list[_WaitingUpdate] = []
        self.waiting: set[int] = set()
        """The tensors of these updates."""
        self.departures: list[_Departure] = []
        self.left: dict[tuple[str, int, int], float] = {}
        """By payload, block or first tensor of a copy, and step: when it had left the device."""
        self.issued: dict[Key, tuple[int, float, int]] = {}
        """By stay and the step of its need: the step in which it was queued, its arrival and its turn."""
        self.offsets: dict[Key, int] = {}
        self.gates = [0.0] * (self.end + 1)
        """Per step: when memory of the framework is there for it."""
        self.starts = [0.0] * self.end
        self.ends = [0.0] * self.end
        self.crossing: dict[Key, int] | None = None
        """The stays over the end of the last iteration, and where they lie."""
        self.beat_s = math.inf
        """The run ends where it becomes certain that the iteration takes so long."""
        self.turn = 0
        self._last: tuple[object, float] | None = None
        """The purpose of the last copy, and its beginning: a copy for the same that could have begun then joins it."""

    def run(self) -> Timetable | None:
        if not self._reserve_places():
            return None
        queue: list[tuple[int, Stay]] = []
        seen = 0
        for step in range(self.end):
            while seen <= step + _AHEAD:
                queue += [(seen, stay) for stay in self.sets.by_need[seen % self.steps]]
                seen += 1
            before = self.ends[step - 1] if step else 0.0
            if step == self.end - self.steps:
                self._close()
            # By the link's clock: a copy that has left by then delays no copy to the device, as none begins earlier.
            self.ranges.advance(step, self.link)
            self._last = None
            self._wait_for_memory(step, before)
            now = [entry for entry in queue if entry[0] == step]
            if any(not self._issue(need, stay, step, None) for need, stay in now):
                self.stuck = step % self.steps
                return None
            queue = queue[len(now) :]
            self._compute(step)
            queue = self._issue_ahead(queue, step)
            if step == self.end - 1 and not self._issue_crossing(queue, step):
                self.stuck = 0
                return None
            self._depart(step)
            if step >= self.end - self.steps and self._least_s(step) >= self.beat_s:
                return None
        return self._result()

    def _least_s(self, step: int) -> float:
        """Return the least time of the last iteration, of which ``step`` has ended: the rest only computes."""
        first = self.end - self.steps
        return self.ends[step] - self.ends[first - 1] + self.work.seconds_after[step - first]

    # -- the arena ---------------------------------------------------------------------------------------------------

    def _reserve_places(self) -> bool:
        """Give long stays and large buffers a place; returns whether there is room for that."""
        placed = place([stay.lifetime(self.steps, early=self.early) for stay in self.placed], self.steps)
        if placed.extent > self.moving:
            return False
        for stay, offset in zip(self.placed, placed.offsets, strict=True):
            high = self.moving - offset
            # One before the first iteration and one behind the last, for stays that run over those ends.
            for need in range(stay.need - self.steps, self.end + self.steps, self.steps):
                last = need + stay.length
                if last >= 0:
                    self.ranges.reserve(Reserved((stay.number, need), high - stay.room, high, need - 1, need, last))
        return True

    def _close(self) -> None:
        """Require the last iteration to end with the copies that it begins with, at the same places."""
        self.ranges.advance(self.end - self.steps, 0.0)
        self.crossing = {}
        for taken in self.ranges.taken:
            number, need = taken.key
            key = number, need + self.steps
            self.crossing[key] = taken.low
            queued, _, _ = self.issued[number, need]
            steps = (queued + self.steps, need + self.steps, taken.last + self.steps)
            self.ranges.reserve(Reserved(key, taken.low, taken.high, *steps))

    # -- copies to the device ----------------------------------------------------------------------------------------

    def _issue(self, need: int, stay: Stay, step: int, latest: float | None) -> bool | None:
        """Queue the copy for a stay in ``step``.

        Returns False if it would not begin before ``latest``, None if it has no place.
        """
        ready = self._ready(stay, latest)
        if stay.group is None:
            ready = max(ready, self.gates[step])
        if latest is not None and max(self.link, ready) >= latest:
            return False
        key = stay.number, need
        if stay.group is not None:
            last = need + stay.length
            # It would lie there at the end of the iteration and did not at its beginning: a plan has to end as it
            # begins.
            if self.crossing is not None and last >= self.end and key not in self.crossing:
                return False
            spot = self.ranges.find(key, stay.room, step, last)
            if spot is None:
                return None
            offset, free_at = spot
            ready = max(ready, free_at)
            if latest is not None and ready >= latest:
                return False
            self.ranges.take(key, offset, stay.room, last)
            self.offsets[key] = offset
        begin = max(self.link, ready)
        purpose = (need, stay.block, stay.group is None, stay.is_state, stay.on_host)
        if self._last is None or self._last[0] != purpose or ready > self._last[1]:
            self.turn += 1
            self._last = purpose, begin
        self.link = begin + self.work.transfer_s(stay.bytes)
        self.issued[key] = step, self.link, self.turn
        # Only until its use: from then on the needs of the sets count it.
        taken = self.taken if stay.group is None else self.arena
        for before in range(step, need):
            taken[before] += stay.room
        return True

    def _issue_ahead(self, queue: list[tuple[int, Stay]], step: int) -> list[tuple[int, Stay]]:
        """Queue the copies that would begin while the step computes; return the rest."""
        end = self.ends[step]
        left: list[tuple[int, Stay]] = []
        for position, (need, stay) in enumerate(queue):
            if self.link >= end:
                return left + queue[position:]
            # Not yet: until then the stay before it, or the update that it waits for, is not over, or what is to return
            # is here.
            if need - step > stay.lead or (stay.group is None and not self._left_before(stay.block, step)):
                left.append((need, stay))
                continue
            if not self._fits(stay, step, need):
                # No room for activations says nothing about the arena, so weights behind them may still come.
                if stay.group is not None:  # what is needed later does not overtake it
                    return left + queue[position:]
                left.append((need, stay))
                continue
            done = self._issue(need, stay, step, end)
            if done is None:
                return left + queue[position:]
            if not done:
                left.append((need, stay))
        return left

    def _fits(self, stay: Stay, step: int, need: int) -> bool:
        if stay.group is not None:
            return max(self.arena[step:need]) + stay.room <= self.limit
        # What is on its way out is counted in this step only: later ones wait for it at their gates.
        now = self.taken[step] + sum([departure.bytes for departure in self.departures])
        return max([now, *self.taken[step + 1 : need]]) + stay.room <= self.framework

    def _issue_crossing(self, queue: list[tuple[int, Stay]], step: int) -> bool:
        """Queue the copies that were on their way at the end of the iteration before; return whether all have room."""
        assert self.crossing is not None
        missing = self.crossing.keys() - self.issued.keys()
        return all(self._issue(need, stay, step, None) for need, stay in queue if (stay.number, need) in missing)

    def _left_before(self, block: int, step: int) -> bool:
        """Return whether the activations of ``block`` are gone before ``step`` begins, so that they may come back."""
        return block in self.activations_out and self.activations_out[block] <= self.gates[step]

    def _ready(self, stay: Stay, latest: float | None) -> float:
        """Return when the host has the data of a copy; infinity if an update of it begins after ``latest``."""
        if stay.group is None:
            return self.activations_out.get(stay.block, 0.0)
        if stay.is_state:
            return max([self.states_out.get(t, 0.0) for t in stay.tensors])
        if self.waiting.isdisjoint(stay.tensors):
            return max([self.current.get(t, 0.0) for t in stay.tensors])
        return max([self._updated(t, latest) for t in stay.tensors])

    def _updated(self, tensor: int, latest: float | None = None) -> float:
        """Return when the host copy of a weight is current; the host works until then, or until ``latest``.

        No further, because a more urgent update may arrive.
        """
        while tensor in self.waiting:
            here = [update for update in self.updates if update.ready <= self.host]
            if here:
                # As the host does it: of what is ready the most urgent, else it is idle until something is.
                update = min(here, key=lambda update: update.deadline)
            else:
                update = min(self.updates, key=lambda update: (update.ready, update.deadline))
            if latest is not None and max(self.host, update.ready) >= latest:
                return math.inf
            self.updates.remove(update)
            self.host = max(self.host, update.ready) + update.seconds
            self.current.update(dict.fromkeys(update.tensors, self.host))
            self.waiting.difference_update(update.tensors)
        return self.current.get(tensor, 0.0)

    # -- computations and copies to the host -------------------------------------------------------------------------

    def _wait_for_memory(self, step: int, before: float) -> None:
        """Set the gate of ``step``: as much of the framework's memory has left by then as is not there."""
        position = step % self.steps
        self.departures = [departure for departure in self.departures if departure.until > before]
        over = self.taken[step] - self.framework
        over += sum(departure.bytes for departure in self.departures)
        gate = before
        for departure in self.departures:  # in the order in which they end
            if over <= 0 and position:  # nothing is on its way from one iteration to the next
                break
            gate = departure.until
            over -= departure.bytes
        self.departures = [departure for departure in self.departures if departure.until > gate]
        self.gates[step] = gate

    def _compute(self, step: int) -> None:
        position, begin = step % self.steps, self.gates[step]
        for stay in self.sets.by_need[position]:
            if not stay.is_state:
                begin = max(begin, self.issued[stay.number, step][1])
        for tensor in self.sets.direct[position]:
            begin = max(begin, self._updated(tensor))
        end = begin + max(self.work.seconds[position], self._read(begin, self.work.reads[position]))
        for stay in self.sets.by_need[position]:
            # The update begins as its states arrive, behind the backward: late states make the step longer, not later.
            if stay.is_state and stay.group is not None:
                updated = sum(self.profile.tensors[copy.tensor].bytes for copy in stay.group.copies)
                arrival = self.issued[stay.number, step][1]
                end = max(end, arrival + updated / self.profile.optimizer.device_bytes_per_s)
        self.starts[step], self.ends[step] = begin, end

    def _read(self, begin: float, seconds: float) -> float:
        """Let copies to the device pause from ``begin`` on while weights are read directly; return for how long."""
        if seconds:
            # Counted as if copies stood still meanwhile; the simulation has both share the link.
            self.link = max(self.link, begin) + seconds
            for key, (step, arrival, turn) in self.issued.items():
                if arrival > begin:
                    self.issued[key] = step, arrival + seconds, turn
        return seconds

    def _depart(self, step: int) -> None:
        """Queue the copies to the host, and the updates there, after the computation of ``step``."""
        sets, profile, position, end = self.sets, self.profile, step % self.steps, self.ends[step]
        rate = profile.hardware.d2h_bytes_per_s
        # The lane to the host is filled in the order in which ops.py issues: gradients, activations, weights, states.
        for sent in self.work.gradients[position]:
            self.back = max(self.back, end) + sent.copy_s
            self.departures.append(_Departure(self.back, sent.bytes, step))
            self.left["grad", sent.tensors[0], step] = self.back
            self._update_on_host(sent, self.back, step)
        written = self.work.written[position]
        if written is not None:
            # The backward writes them from its begin on, and is done when they are there.
            self.back = max(self.back, self.starts[step]) + written.copy_s
            self.ends[step] = end = max(end, self.starts[step] + written.copy_s)
            self._update_on_host(written, end, step)
        block = sets.timeline.block(position)
        nbytes = sets.offloaded(block)
        if nbytes and not sets.timeline.is_backward(position):
            self.back = self.activations_out[block] = max(self.back, end) + nbytes / rate
            self.departures.append(_Departure(self.back, nbytes, step))
            self.left["activation", block, step] = self.back
        gone: dict[int, float] = {}
        for tensors in sets.write_backs[position]:
            self.back = max(self.back, end) + sum(profile.tensors[t].bytes for t in tensors) / rate
            self.current.update(dict.fromkeys(tensors, self.back))
        for tensors in sets.state_offloads[position]:
            self.back = max(self.back, end) + sum(profile.tensors[t].state_bytes for t in tensors) / rate
            gone.update(dict.fromkeys(tensors, self.back))
        self.states_out.update(gone)
        for stay in sets.ending[position]:
            key = stay.number, step - stay.length
            if key not in self.offsets:
                continue  # it came before the first iteration
            # Until the host has the newest contents.
            times = [gone.get(t, 0.0) for t in stay.tensors] if stay.is_state else []
            until = max([end, *times, *[self.current.get(t, 0.0) for t in stay.written]])
            self.ranges.leave(self.offsets[key], stay.room, until)

    def _update_on_host(self, sent: HostUpdate, ready: float, step: int) -> None:
        for t in sent.tensors:
            if t in self.waiting:
                self._updated(t)  # that of the iteration before, for which nobody has waited
        self.waiting.update(sent.tensors)
        self.updates.append(_WaitingUpdate(ready, step + sent.wait, sent.update_s, sent.tensors))

    # -- the result --------------------------------------------------------------------------------------------------

    def _result(self) -> Timetable | None:
        first = self.end - self.steps
        arrivals: dict[int, tuple[int, int, int]] = {}
        """By stay: its lead, its offset and its turn."""
        for (number, need), (step, _, turn) in self.issued.items():
            if step >= first:
                # Queued twice, or below never, in the last iteration: that cannot be repeated.
                if number in arrivals:
                    return None
                arrivals[number] = need - step, self.offsets.get((number, need), 0), turn
        if len(arrivals) < len(self.sets.stays):
            return None
        copies = dict(self._copies(arrivals))
        return Timetable(
            sets=self.sets,
            copies=tuple(copies[copy] for copy in self.sets.copies),
            arena_bytes=max((copy.offset + copy.room for copy in copies.values()), default=0),
            activations={
                stay.block: self._activations(stay, arrivals[stay.number], first)
                for stay in self.sets.stays
                if stay.group is None
            },
            gradients={
                t: released
                for step, parts in enumerate(self.sets.gradients)
                for tensors in parts
                for released in [self._released("grad", tensors[0], first + step) - first]
                for t in tensors
            },
            # An iteration that leaves more work behind than it found looks shorter than it is in a row.
            seconds=max(self.ends[-1] - self.ends[first - 1], self._later()),
        )

    def _copies(self, arrivals: Mapping[int, tuple[int, int, int]]) -> Iterator[tuple[DeviceCopy, DeviceCopy]]:
        """Yield every copy with its time and place; permanent ones lie at the bottom."""
        offset = 0
        for group in self.sets.always:
            yield from _side_by_side(group, offset, arrival=0, turn=0)
            offset += group.room
        moved = self._without_holes({number: low for number, (_, low, _) in arrivals.items()})
        for stay in self.sets.stays:
            if stay.group is not None:
                lead, _, turn = arrivals[stay.number]
                arrival = (stay.need - lead) % self.steps
                yield from _side_by_side(stay.group, offset + moved[stay.number], arrival=arrival, turn=turn)

    def _without_holes(self, offsets: dict[int, int]) -> dict[int, int]:
        """Return ``offsets`` of stays less the ranges below them that none ever takes."""
        stays = [stay for stay in self.sets.stays if stay.group is not None]
        lowered: dict[int, int] = {}
        top = hole = 0
        for stay in sorted(stays, key=lambda stay: offsets[stay.number]):
            hole += max(0, offsets[stay.number] - top)
            lowered[stay.number] = offsets[stay.number] - hole
            top = max(top, offsets[stay.number] + stay.room)
        return lowered

    def _later(self) -> float:
        """Return how much later than the last iteration another one, right behind it, would be."""
        self._wait_for_memory(self.end, self.ends[-1])
        waits = [self.gates[self.end] - self.starts[self.end - self.steps]]
        for (number, need), (_, arrival, _) in self.issued.items():
            if need >= self.end:  # it was on its way when the iteration ended
                before = self.ends if self.sets.stays[number].is_state else self.starts
                waits.append(arrival - before[need - self.steps])
        return max(waits)

    def _activations(self, stay: Stay, arrival: tuple[int, int, int], first: int) -> ActivationTimes:
        lead, _, turn = arrival
        left = self._released("activation", stay.block, first + self.sets.timeline.forward(stay.block)) - first
        step = stay.need - lead
        return ActivationTimes(release_after=min(left, step - 1), prefetch_at=step, turn=turn)

    def _released(self, payload: str, index: int, step: int) -> int:
        """Return the last step before which framework memory had not left."""
        left = self.left[payload, index, step]
        following = step + 1
        while following < self.end and self.gates[following] < left:
            following += 1
        return following - 1


def _side_by_side(group: CopyGroup, offset: int, *, arrival: int, turn: int) -> Iterator[tuple[DeviceCopy, DeviceCopy]]:
    for copy in group.copies:
        yield copy, replace(copy, offset=offset, arrival=arrival, turn=turn)
        offset += copy.room
