"""The ops of an iteration in issue order.

These are drafts: they name tensors. Which of those travel together is known once all ops are there, see ``groups.py``,
and so is what each waits for, see ``link.py``.

Several micro-batches per update are one list, too, in which every op says the kinds of passes that carry it out. The
sum of a tensor's gradients lies where its states are, and a timetable has room for both in one copy: states travel for
the update, sums in every pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lt_offload.plan.assembly.copies import DeviceCopy
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.memory import aligned, state_room
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.lanes import LaneName, OpKind
from lt_offload.schema.plan import ADDING, Pass, Payload, Rows, Save
from lt_offload.schema.profile import Profile, TensorProfile

ONE_BATCH: tuple[Pass, ...] = ("updating",)
_APART: tuple[Payload, ...] = ("state", "sum")
_LOOKED_UP: Rows = "looked up"
Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedTable:
    """A table that is updated in two parts. Decisions know it as a matrix of the last block alone."""

    index: int
    profile: Profile
    """The profile in which it is a table."""

    @property
    def tensor(self) -> TensorProfile:
        """The table as both blocks use it."""
        return self.profile.tensors[self.index]


@dataclass(kw_only=True, slots=True)
class Draft:
    """An op that names tensors, one by one; else the fields are those of :class:`lt_offload.schema.plan.Op`.

    It is completed where it stands: copies of thousands of them take a tenth of the time of a plan.
    """

    id: int
    kind: OpKind
    step: int
    block: int
    lane: LaneName
    payload: Payload | None = None
    tensors: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Arena offset per tensor, for prefetches of weights and states."""
    host_offset: int | None = None
    """Address at which copied gradients arrive."""
    bytes: int = 0
    after: tuple[int, ...] = ()
    release_after: int | None = None
    save: Save | None = None
    zero_copy: tuple[int, ...] = ()
    """For computations: the tensors that they read in host memory."""
    passes: tuple[Pass, ...] = ONE_BATCH
    rows: Rows | None = None


class Emitter:
    """The ops of ``timetable`` in issue order, after :meth:`emit`, and the maps that linking them needs.

    Where others wait for an op that passes carry out in different ways, there is one for each way, and they wait for
    all of these.
    """

    def __init__(
        self, timetable: Timetable, passes: tuple[Pass, ...] = ONE_BATCH, table: TiedTable | None = None
    ) -> None:
        self.table = table
        self.timetable, self.sets, self.copies = timetable, timetable.sets, timetable.copies
        self.decisions, self.profile = self.sets.decisions, self.sets.profile
        profile = self.profile
        self.timeline = timeline(profile)
        self.adds_up, self.delayed = len(passes) > 1, "settling" in passes
        self.every, self.updating = passes, passes[-1:]
        self.computing = ADDING if self.delayed else passes
        """The passes of a micro-batch."""
        self.ops: list[Draft] = []
        self.fetched_by: dict[int, list[DeviceCopy]] = {}
        """Copies that each prefetch op of weights, states or sums brings."""
        self.fetches: dict[DeviceCopy, Ids] = defaultdict(tuple)
        """By copy: the ops that bring it."""
        self.releases: dict[DeviceCopy, Ids] = {}
        """By copy: the ops after which its range may be written again."""
        self.computations: list[int] = []
        """By step: its forward or backward."""
        self.computed: list[Ids] = []
        """By step: its last op on the compute lane."""
        self.added: dict[int, int] = {}
        """By tensor: the op that adds its gradient to the sum."""
        self.updated: dict[int, int] = {}
        """By tensor: the op that updates it."""
        self.reduced: dict[int, int] = {}
        """By tensor: the op in which machines add up."""
        self.current: dict[int, int] = {}
        """By tensor: the op that makes its weight's host copy current."""
        self.states_out: dict[int, Ids] = {}
        self.grads_out: dict[int, Ids] = {}
        self.begins: dict[int, int] = {}
        """By tensor: the op that copies its first gradient to where the sum is."""
        self.of_rows: Ids = ()
        """The copy of the gradient of rows that are looked up; what adds that up; what updates them."""
        self.activations_out: dict[int, int] = {}
        self.activations_in: dict[int, int] = {}
        self.held_until: dict[int, list[int]] = defaultdict(list)
        """By step: the offloads whose framework memory is given back at its end."""
        self.of_block: list[list[int]] = [[] for _ in profile.blocks]
        for index, tensor in enumerate(profile.tensors):
            for block in tensor.blocks:
                self.of_block[block].append(index)
        self.copies_of: dict[tuple[str, int], list[DeviceCopy]] = defaultdict(list)
        self._computations: dict[int, list[Computation]] = defaultdict(list)
        for computation in computations(self.decisions.options, self.decisions.recomputations, profile):
            self._computations[computation.step].append(computation)
        self._fetched_at: dict[int, list[DeviceCopy]] = defaultdict(list)
        self._released_at: dict[int, list[DeviceCopy]] = defaultdict(list)
        for copy in self.copies:
            self.copies_of[copy.payload, copy.tensor].append(copy)
            if copy.stay is not None:
                self._fetched_at[copy.arrival].append(copy)
                self._released_at[copy.stay.end].append(copy)
        self._offsets: dict[tuple[Payload, int], int] = {}
        """Offsets of states and sums, by tensor, where these are apart."""
        self.beside: dict[DeviceCopy, list[DeviceCopy]] = {}
        """By copy of states: those that lie side by side with it, in whose range its states and its sum are apart."""
        if self.adds_up:
            self._divide_states()
        self._settled = self._moved_in_settling() if self.delayed else set()

    @property
    def initial(self) -> dict[tuple[Payload, int], int]:
        """The offsets of what is on the device at the start, by payload and tensor."""
        return {
            (payload, copy.tensor): self._offset(copy, payload)
            for copy in self.copies
            if copy.at_start
            for payload in (_APART if self.adds_up and copy.payload == "state" else (copy.payload,))
            # A weight may be empty, and is used all the same.
            if payload == "weight" or self.room_of(payload, copy.tensor)
        }

    def bytes_of(self, payload: Payload, tensor: int) -> int:
        """Return the bytes of a tensor's weight, gradient, states or sum."""
        known = self.profile.tensors[tensor]
        if payload != "state":
            return known.bytes
        return known.state_bytes - (known.sum_bytes if self.adds_up else 0)

    def room_of(self, payload: Payload, tensor: int) -> int:
        """Return the bytes of the arena that these take."""
        nbytes = self.bytes_of(payload, tensor)
        return state_room(nbytes) if payload == "state" else aligned(nbytes)

    def _offset(self, copy: DeviceCopy, payload: Payload) -> int:
        return self._offsets.get((payload, copy.tensor), copy.offset)

    def range_of(self, copy: DeviceCopy) -> tuple[int, int]:
        """Return the range of the arena in which ``copy`` lies, with those beside it if states and sums are apart."""
        copies = self.beside.get(copy, [copy])
        return min(one.offset for one in copies), max(one.offset + one.room for one in copies)

    def _divide_states(self) -> None:
        """Give states and sums their places: where several lie side by side, all states, and then all sums."""
        placed = dict(zip(self.sets.copies, self.copies, strict=True))
        groups = [*self.sets.always, *(stay.group for stay in self.sets.stays if stay.group is not None)]
        for copies in ([placed[copy] for copy in group.copies] for group in groups):
            if copies[0].payload != "state":
                continue
            self.beside.update(dict.fromkeys(copies, copies))
            offset = copies[0].offset
            for payload in _APART:
                for copy in copies:
                    self._offsets[payload, copy.tensor] = offset
                    offset += self.room_of(payload, copy.tensor)

    def _moved_in_settling(self) -> set[DeviceCopy]:
        """Return the stays that begin or end in a settling pass.

        What is on the device at its start stays there, and what an update on the device needs besides comes to its
        planned place, from which it displaces what is there until it comes back at its time. What the host updates
        comes back renewed.
        """
        places = [decision.place for decision in self.decisions.tensors]
        used = [
            copy
            for copy in self.copies
            if copy.stay is not None
            and places[copy.tensor] in ("device", "paged")
            and copy.covers(self.sets.update_step[copy.tensor])
        ]
        staying = {(copy.payload, copy.tensor): copy for copy in self.copies if copy.at_start and copy.stay is not None}
        moved = {copy for copy in staying.values() if places[copy.tensor] == "host"}
        while True:
            moved.update(copy for copy in used if staying.get((copy.payload, copy.tensor)) in (None, *moved))
            low, high = np.array([self.range_of(copy) for copy in moved], dtype=np.int64).reshape(-1, 2).T
            displaced = {
                copy
                for copy in staying.values()
                if copy not in moved
                for start, end in [self.range_of(copy)]
                if np.any((low < end) & (high > start))
            }
            if not displaced:
                return moved
            moved |= displaced

    # -- ops ---------------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Write every op."""
        for step in range(len(self.timeline)):
            # The order of these calls is the order within a step of schema/plan.py, to which check.py holds every plan.
            self._prefetches(step)
            for computation in self._computations[step]:
                self._compute(computation)
            self._updates(step)
            self._activation_offload(step)
            self._write_backs(step)
            self._state_offloads(step)
            self._drops(step)

    def _prefetches(self, step: int) -> None:
        """Copies to the device by turns, then by need; activations before the weights that are needed with them."""
        fetches: dict[tuple[int, int, int, int, bool], list[DeviceCopy]] = defaultdict(list)
        for block, times in self.timetable.activations.items():
            if times.prefetch_at == step:
                wait = self.decisions.activations_needed(block, self.profile) - step
                fetches[times.turn, wait, block, 0, False] = []
        for copy in self._fetched_at[step]:
            block, wait = self._need(copy, step)
            # What waits for an update on the host does not delay the rest.
            on_host = copy.payload == "weight" and self.decisions.tensors[copy.tensor].place == "host"
            fetches[copy.turn, wait, block, 1 if copy.payload == "weight" else 2, on_host].append(copy)
        for (_, _, block, _, _), copies in sorted(fetches.items()):
            if not copies:
                nbytes = self.sets.offloaded(block)
                self.activations_in[block] = self._copy("prefetch", step, block, "activation", bytes=nbytes)
            elif copies[0].payload == "weight" or not self.adds_up:
                self._move("prefetch", step, copies[0].payload, copies, self.every, block)
            else:
                # What is on the device at the start of a pass has to be there at its end in passes of every kind.
                states = self._of_states(copies)
                travelling = [copy for copy in states if not copy.at_start]
                self._move("prefetch", step, "state", travelling, self.updating, block)
                self._move("prefetch", step, "state", [copy for copy in states if copy.at_start], self.every, block)
                self._move("prefetch", step, "sum", copies, self.every, block)

    def _of_states(self, copies: Iterable[DeviceCopy]) -> list[DeviceCopy]:
        return [copy for copy in copies if self.bytes_of("state", copy.tensor)]

    def _need(self, copy: DeviceCopy, step: int) -> tuple[int, int]:
        """Return the block that needs ``copy`` first from ``step`` on, and how many steps later."""
        assert copy.stay is not None
        blocks, need = self.profile.tensors[copy.tensor].blocks, copy.stay.start
        computed = [computation.block for computation in self._computations[need]]
        # Those that run again in a step ascend to the block whose backward it is.
        return min(block for block in computed if block in blocks), (need - step) % len(self.timeline)

    def _compute(self, what: Computation) -> None:
        tensors = [] if what.idle else self.of_block[what.block]
        zero_copy = [t for t in tensors if what.step in self.decisions.tensors[t].zero_copy]
        nbytes, _ = what.zero_copy(zero_copy, self.profile)
        if self.table is not None and not what.block:
            zero_copy.append(self.table.index)
            read = self.table.tensor.read(0)
            nbytes += read.forward_bytes if what.kind == "forward" else read.backward_bytes
        fields: dict[str, Any] = {"bytes": nbytes, "save": what.save, "zero_copy": tuple(zero_copy)}
        op = self._add(what.kind, what.step, what.block, "compute", **fields)
        if what.save is None:
            self.computations.append(op)
            self.computed.append((op,))

    def _updates(self, step: int) -> None:
        ready = [t for t, update in self.sets.update_step.items() if update == step]
        # Two ops, so that tensors whose states are there do not wait for states that travel.
        for place in ("device", "paged"):
            tensors = [t for t in ready if self.decisions.tensors[t].place == place]
            self._update(step, tensors, "compute", ADDING)
        written = self.sets.written[step]
        self._write_gradients(step, written)
        block, copied = self.timeline.block(step), self.sets.gradients[step]
        for tensors in copied:
            release_after = self.timetable.gradients[tensors[0]]
            sends = [passes for passes in (self.computing[:1], self.computing[1:]) if passes]
            for passes in sends:
                fields: dict[str, Any] = {"release_after": release_after, "passes": passes, "rows": self._rows(tensors)}
                out = self._copy("offload", step, block, "grad", tensors, **fields)
                self.held_until[release_after].append(out)
                for t in tensors:
                    self.grads_out[t] = (*self.grads_out.get(t, ()), out)
            if len(sends) > 1:
                self.begins.update(dict.fromkeys(tensors, out - 1))
        # One update per copy: the host can begin when the first gradients have arrived. Sums that a copy has begun are
        # there: adding is what later passes do.
        for tensors, passes in ((written, ADDING), *((tensors, ADDING[1:]) for tensors in copied)):
            self._update(step, tensors, "host", passes)
            self.current.update({t: self.updated[t] for t in tensors})
        if self.table is not None and step == self.timeline.backward(0):
            self._update_rows(step, self.table)

    def _update_rows(self, step: int, table: TiedTable) -> None:
        """Rows that are looked up get the gradients of both blocks; where updates wait, that of the table is theirs."""
        tensors, rows = (table.index,), _LOOKED_UP
        nbytes = table.tensor.lookup_bytes
        out = self._copy("offload", step, 0, "grad", tensors, bytes=nbytes, release_after=step, rows=rows)
        self.of_rows = (out,)
        if self.adds_up:
            self.of_rows += (self._add("accumulate", step, 0, "host", tensors, passes=ADDING, rows=rows),)
        if not self.delayed:
            self.of_rows += (self._add("update", step, 0, "host", tensors, passes=self.updating, rows=rows),)

    def _rows(self, tensors: Sequence[int]) -> Rows | None:
        return "others" if self.table is not None and self.table.index in tensors else None

    def _write_gradients(self, step: int, tensors: list[int]) -> None:
        if tensors:
            fields: dict[str, Any] = {"payload": "grad", "bytes": self._bytes(tensors), "release_after": step}
            out = self._add("offload", step, self.timeline.block(step), "compute", tensors, **fields)
            self.grads_out.update(dict.fromkeys(tensors, (out,)))
            # Written by the backward itself, so what has to come after the step's computing comes after this.
            self.computed[step] = (out,)

    def _update(self, step: int, tensors: list[int], lane: LaneName, adding: tuple[Pass, ...]) -> None:
        """Write an update, in front of it what adds up in passes without it, and behind it what machines add up."""
        if not tensors:
            return
        block = self.timeline.block(step)
        ops: Ids = ()
        if self.adds_up:
            adds = self._add("accumulate", step, block, lane, tensors, passes=adding, rows=self._rows(tensors))
            self.added.update(dict.fromkeys(tensors, adds))
            ops = (adds,)
        rows = None if self.delayed else self._rows(tensors)
        ops += (self._add("update", step, block, lane, tensors, passes=self.updating, rows=rows),)
        self.updated.update(dict.fromkeys(tensors, ops[-1]))
        if lane == "compute":
            self.computed[step] = ops
        elif self.delayed and self.profile.machines > 1 and self.profile.common_updates:
            nbytes = self._bytes(tensors)
            reduces = self._add("reduce", step, block, "network", tensors, bytes=nbytes, passes=ADDING)
            self.reduced.update(dict.fromkeys(tensors, reduces))

    def users(self, tensor: int) -> Ids:
        """Return the ops that read or change a tensor's sum: what adds to it, and its update."""
        return (*self.adds(tensor), self.updated[tensor])

    def changes(self, tensor: int) -> Ids:
        """Return the ops in which a tensor's states, sum and weight change where it is updated."""
        return self.users(tensor) if self.decisions.tensors[tensor].place != "host" else (self.updated[tensor],)

    def adds(self, tensor: int) -> Ids:
        """Return the op that adds to a tensor's sum, if there is one."""
        return (self.added[tensor],) if self.adds_up else ()

    def _activation_offload(self, step: int) -> None:
        """Before other copies to the host: the next computations wait for this memory."""
        block = self.timeline.block(step)
        times = None if self.timeline.is_backward(step) else self.timetable.activations.get(block)
        if times is not None:
            nbytes = self.sets.offloaded(block)
            out = self._copy("offload", step, block, "activation", bytes=nbytes, release_after=times.release_after)
            self.held_until[times.release_after].append(out)
            self.activations_out[block] = out

    def _write_backs(self, step: int) -> None:
        for tensors in self.sets.write_backs[step]:
            block = self.profile.tensors[tensors[0]].blocks[0]
            passes = self.updating
            if any(self.sets.update_step[t] > step for t in tensors):  # the pass before has updated them
                passes = (*self.computing[:1], *self.computing[2:])
            out = self._copy("offload", step, block, "weight", tensors, passes=passes)
            self.current.update(dict.fromkeys(tensors, out))

    def _state_offloads(self, step: int) -> None:
        """Out goes what a pass has changed: states by updates, sums by adding. The rest only makes room, see drops."""
        for tensors in self.sets.state_offloads[step]:
            copies = [copy for t in tensors for copy in self.copies_of["state", t]]
            if self.adds_up:
                out = self._move("offload", step, "state", self._of_states(copies), self.updating)
                out += self._move("offload", step, "sum", copies, ADDING)
            else:
                out = self._move("offload", step, "state", copies, self.updating)
            self.states_out.update(dict.fromkeys(tensors, tuple(out)))
            self.releases.update(dict.fromkeys(copies, tuple(out)))

    def _drops(self, step: int) -> None:
        drops: dict[tuple[int, int], list[DeviceCopy]] = defaultdict(list)
        for copy in self._released_at[step]:
            if copy.payload == "weight":
                # What waits for a write-back does not delay the rest.
                waits = 0
                if self.decisions.tensors[copy.tensor].write_back is not None:
                    waits = self.current.get(copy.tensor, 0) + 1
                drops[self.profile.tensors[copy.tensor].blocks[0], waits].append(copy)
        for (block, _), copies in sorted(drops.items()):
            out = self._move("drop", step, "weight", copies, self.every, block)
            self.releases.update(dict.fromkeys(copies, tuple(out)))
        for tensors in self.sets.state_offloads[step] if self.adds_up else ():
            copies = [copy for t in tensors for copy in self.copies_of["state", t]]
            starting = [copy for copy in self._of_states(copies) if copy.at_start]
            self._move("drop", step, "state", starting, ADDING)
            self._move("drop", step, "sum", copies, self.updating)

    def _move(
        self,
        kind: OpKind,
        step: int,
        payload: Payload,
        copies: list[DeviceCopy],
        passes: tuple[Pass, ...],
        block: int | None = None,
    ) -> list[int]:
        """Write the op by which ``copies`` come or leave; return it, and what a settling pass has in its place.

        That moves some of them, perhaps. What an update has changed is copied to the host there also where it stays.
        """
        moved = [copy for copy in copies if copy in self._settled]
        parts = [(copies, passes, True)]
        if "settling" in passes and moved != copies:
            parts = [(copies, passes[:-1], True), (moved, self.updating, True)]
            if kind == "offload":
                parts.append(([copy for copy in copies if copy not in moved], self.updating, False))
        ops = []
        for some, which, leaves in parts:
            if some and which:
                tensors = [copy.tensor for copy in some]
                of = self.profile.tensors[tensors[0]].blocks[0] if block is None else block
                release = step if kind == "offload" and leaves else None
                op = self._copy(kind, step, of, payload, tensors, release_after=release, passes=which)
                ops.append(op)
                if kind == "prefetch":
                    self.ops[op].offsets = tuple(self._offset(copy, payload) for copy in some)
                    self.fetched_by[op] = some
                    for copy in some:
                        self.fetches[copy] += (op,)
        return ops

    def _copy(
        self, kind: OpKind, step: int, block: int, payload: Payload, tensors: Sequence[int] = (), **fields: Any
    ) -> int:
        """Write a copy or a drop; ``fields`` are further ones of its :class:`Draft`."""
        lanes: Mapping[OpKind, LaneName] = {"prefetch": "h2d", "offload": "d2h"}
        fields.setdefault("bytes", sum(self.bytes_of(payload, t) for t in tensors))
        return self._add(kind, step, block, lanes.get(kind, "none"), tensors, payload=payload, **fields)

    def _add(
        self, kind: OpKind, step: int, block: int, lane: LaneName, tensors: Iterable[int] = (), **fields: Any
    ) -> int:
        fields.setdefault("passes", self.computing)
        op = Draft(id=len(self.ops), kind=kind, step=step, block=block, lane=lane, tensors=tuple(tensors), **fields)
        self.ops.append(op)
        return op.id

    def _bytes(self, tensors: Iterable[int]) -> int:
        return sum(self.profile.tensors[t].bytes for t in tensors)
