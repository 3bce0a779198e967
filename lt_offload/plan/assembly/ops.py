"""The ops of an iteration in issue order, each linked to the ops that it has to wait for.

These are drafts: they name tensors. Which of those travel together is known once all ops are there; see ``groups.py``.
What an op waits for is data first, then the ranges of the arena that it writes. Every dependency names the latest issue
of the other op before this one; an id that is not smaller means the iteration before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lt_offload.plan.assembly.copies import PlacedCopy
from lt_offload.plan.assembly.timetable import Timetable
from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.lanes import LaneName, OpKind
from lt_offload.schema.plan import Payload, Save


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


class Emitter:
    """The ops of ``timetable`` in issue order, after :meth:`emit`, and the maps that linking them needs."""

    def __init__(self, timetable: Timetable) -> None:
        self.timetable, self.sets, self.copies = timetable, timetable.sets, timetable.copies
        self.decisions, self.profile = self.sets.decisions, self.sets.profile
        profile = self.profile
        self.timeline = timeline(profile)
        self.ops: list[Draft] = []
        self.fetched_by: dict[int, list[PlacedCopy]] = {}
        """Copies that each prefetch op of weights or states brings."""
        self.fetches: dict[PlacedCopy, int] = {}
        """By copy: the op that brings it."""
        self.releases: dict[PlacedCopy, list[int]] = {}
        """By copy: the ops after which its range may be written again."""
        self.computations: list[int] = []
        """By step: its forward or backward."""
        self.computed: list[int] = []
        """By step: its last op on the compute lane."""
        self.updated: dict[int, int] = {}
        """By tensor: the op that updates it."""
        self.current: dict[int, int] = {}
        """By tensor: the op that makes its weight's host copy current."""
        self.states_out: dict[int, int] = {}
        self.grads_out: dict[int, int] = {}
        self.activations_out: dict[int, int] = {}
        self.activations_in: dict[int, int] = {}
        self.held_until: dict[int, list[int]] = defaultdict(list)
        """By step: the offloads whose framework memory is given back at its end."""
        self.of_block: list[list[int]] = [[] for _ in profile.blocks]
        for index, tensor in enumerate(profile.tensors):
            for block in tensor.blocks:
                self.of_block[block].append(index)
        self.copies_of: dict[tuple[str, int], list[PlacedCopy]] = defaultdict(list)
        self._computations: dict[int, list[Computation]] = defaultdict(list)
        for computation in computations(self.decisions.options, self.decisions.recomputations, profile):
            self._computations[computation.step].append(computation)
        self._fetched_at: dict[int, list[PlacedCopy]] = defaultdict(list)
        self._released_at: dict[int, list[PlacedCopy]] = defaultdict(list)
        for copy in self.copies:
            self.copies_of[copy.payload, copy.tensor].append(copy)
            if copy.stay is not None:
                self._fetched_at[copy.arrival].append(copy)
                self._released_at[copy.stay.end].append(copy)

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
        fetches: dict[tuple[int, int, int, int, bool], list[PlacedCopy]] = defaultdict(list)
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
                self.activations_in[block] = self._copy("prefetch", step, block, "activation", nbytes=nbytes)
                continue
            fetch = self._copy("prefetch", step, block, copies[0].payload, copies)
            self.fetched_by[fetch] = copies
            self.fetches.update(dict.fromkeys(copies, fetch))

    def _need(self, copy: PlacedCopy, step: int) -> tuple[int, int]:
        """Return the block that needs ``copy`` first from ``step`` on, and how many steps later."""
        assert copy.stay is not None
        blocks, need = self.profile.tensors[copy.tensor].blocks, copy.stay.start
        computed = [computation.block for computation in self._computations[need]]
        # Those that run again in a step ascend to the block whose backward it is.
        return min(block for block in computed if block in blocks), (need - step) % len(self.timeline)

    def _compute(self, what: Computation) -> None:
        """Write a computation; the last one of a step is its forward or backward."""
        tensors = [] if what.idle else self.of_block[what.block]
        zero_copy = [t for t in tensors if what.step in self.decisions.tensors[t].zero_copy]
        nbytes, _ = what.zero_copy(zero_copy, self.profile)
        op = self._add(
            what.kind,
            what.step,
            what.block,
            "compute",
            nbytes=nbytes,
            save=what.save,
            zero_copy=zero_copy,
        )
        if what.save is None:
            self.computations.append(op)
            self.computed.append(op)

    def _updates(self, step: int) -> None:
        """Updates on the device, gradients to the host, and the updates there."""
        ready = [t for t, update in self.sets.update_step.items() if update == step]
        # Two ops, so that tensors whose states are there do not wait for states that travel.
        for place in ("device", "paged"):
            self._update(step, [t for t in ready if self.decisions.tensors[t].place == place], "compute")
        written = self.sets.written[step]
        self._write_gradients(step, written)
        block, copied = self.timeline.block(step), self.sets.gradients[step]
        for tensors in copied:
            release_after, nbytes = self.timetable.gradients[tensors[0]], self._bytes(tensors)
            out = self._copy(
                "offload", step, block, "grad", tensors=tensors, nbytes=nbytes, release_after=release_after
            )
            self.held_until[release_after].append(out)
            self.grads_out.update(dict.fromkeys(tensors, out))
        # One update per copy: the host can begin when the first gradients have arrived.
        for tensors in (written, *copied):
            self._update(step, tensors, "host")
            self.current.update({t: self.updated[t] for t in tensors})

    def _write_gradients(self, step: int, tensors: list[int]) -> None:
        """Gradients that the backward writes to host memory itself."""
        if tensors:
            block, nbytes = self.timeline.block(step), self._bytes(tensors)
            out = self._add(
                "offload",
                step,
                block,
                "compute",
                "grad",
                tensors=tensors,
                nbytes=nbytes,
                release_after=step,
            )
            self.grads_out.update(dict.fromkeys(tensors, out))
            # Written by the backward itself, so what has to come after the step's computing comes after this.
            self.computed[step] = out

    def _update(self, step: int, tensors: list[int], lane: LaneName) -> None:
        if tensors:
            update = self._add("update", step, self.timeline.block(step), lane, tensors=tensors)
            self.updated.update(dict.fromkeys(tensors, update))
            if lane == "compute":
                self.computed[step] = update

    def _activation_offload(self, step: int) -> None:
        """Before other copies to the host: the next computations wait for this memory."""
        block = self.timeline.block(step)
        times = None if self.timeline.is_backward(step) else self.timetable.activations.get(block)
        if times is not None:
            nbytes = self.sets.offloaded(block)
            out = self._copy("offload", step, block, "activation", nbytes=nbytes, release_after=times.release_after)
            self.held_until[times.release_after].append(out)
            self.activations_out[block] = out

    def _write_backs(self, step: int) -> None:
        for tensors in self.sets.write_backs[step]:
            block = self.profile.tensors[tensors[0]].blocks[0]
            out = self._copy("offload", step, block, "weight", tensors=tensors, nbytes=self._bytes(tensors))
            self.current.update(dict.fromkeys(tensors, out))

    def _state_offloads(self, step: int) -> None:
        for tensors in self.sets.state_offloads[step]:
            block = self.profile.tensors[tensors[0]].blocks[0]
            copies = [copy for t in tensors for copy in self.copies_of["state", t]]
            nbytes = sum(copy.bytes for copy in copies)
            out = self._copy("offload", step, block, "state", tensors=tensors, nbytes=nbytes, release_after=step)
            self.states_out.update(dict.fromkeys(tensors, out))
            self.releases.update({copy: [out] for copy in copies})

    def _drops(self, step: int) -> None:
        drops: dict[tuple[int, int], list[PlacedCopy]] = defaultdict(list)
        for copy in self._released_at[step]:
            if copy.payload == "weight":
                # What waits for a write-back does not delay the rest.
                waits = 0
                if self.decisions.tensors[copy.tensor].write_back is not None:
                    waits = self.current.get(copy.tensor, 0) + 1
                drops[self.profile.tensors[copy.tensor].blocks[0], waits].append(copy)
        for (block, _), copies in sorted(drops.items()):
            tensors = [copy.tensor for copy in copies]
            drop = self._add("drop", step, block, "none", "weight", tensors=tensors, nbytes=self._bytes(tensors))
            self.releases.update({copy: [drop] for copy in copies})

    def _copy(
        self,
        kind: OpKind,
        step: int,
        block: int,
        payload: Payload,
        copies: Sequence[PlacedCopy] = (),
        *,
        tensors: Iterable[int] = (),
        nbytes: int = 0,
        release_after: int | None = None,
    ) -> int:
        nbytes = nbytes or sum(copy.bytes for copy in copies)
        return self._add(
            kind,
            step,
            block,
            "h2d" if kind == "prefetch" else "d2h",
            payload,
            tensors=[copy.tensor for copy in copies] or tensors,
            offsets=[copy.offset for copy in copies],
            nbytes=nbytes,
            release_after=release_after,
        )

    def _add(
        self,
        kind: OpKind,
        step: int,
        block: int,
        lane: LaneName,
        payload: Payload | None = None,
        *,
        tensors: Iterable[int] = (),
        offsets: Iterable[int] = (),
        nbytes: int = 0,
        release_after: int | None = None,
        save: Save | None = None,
        zero_copy: Iterable[int] = (),
    ) -> int:
        op = Draft(
            id=len(self.ops),
            kind=kind,
            step=step,
            block=block,
            lane=lane,
            payload=payload,
            tensors=tuple(tensors),
            offsets=tuple(offsets),
            bytes=nbytes,
            release_after=release_after,
            save=save,
            zero_copy=tuple(zero_copy),
        )
        self.ops.append(op)
        return op.id

    def _bytes(self, tensors: Iterable[int]) -> int:
        return sum(self.profile.tensors[t].bytes for t in tensors)


def link(emitted: Emitter) -> list[Draft]:
    """Return the ops of ``emitted``, of which it fills in ``after``."""
    linker = _Linker(emitted)
    for op in emitted.ops:
        op.after = tuple(sorted(linker.after(op)))
    return emitted.ops


class _Linker:
    def __init__(self, emitted: Emitter) -> None:
        self.emitted = emitted
        self.moving = [copy for copy in emitted.copies if copy.stay is not None]
        self.releases = [emitted.releases[copy] for copy in self.moving]
        for copy, releases in zip(self.moving, self.releases, strict=True):
            if copy.payload == "state" and copy.stay is not None:
                # Given back at the end of a step, after everything that has been computed until then.
                releases.append(emitted.computed[copy.stay.end])
        self.low = np.array([copy.offset for copy in self.moving], dtype=np.int64)
        self.high = np.array([copy.offset + copy.room for copy in self.moving], dtype=np.int64)
        self.released = np.array([max(releases) for releases in self.releases], dtype=np.int64)

    def after(self, op: Draft) -> set[int]:
        """Return the ids of the ops that must have ended before ``op`` starts."""
        if op.kind in ("forward", "backward"):
            return self._computation(op)
        if op.kind == "prefetch":
            return self._prefetch(op)
        e = self.emitted
        if op.kind == "update":
            if op.lane == "host":
                return {e.grads_out[t] for t in op.tensors}
            fetched = {e.fetches[copy] for t in op.tensors for copy in e.copies_of["state", t] if copy in e.fetches}
            return fetched | {e.computations[op.step]}
        if op.kind == "drop":
            # Until the last computation has used it and the host has the newest value, nobody may overwrite its range.
            written = {e.current[t] for t in op.tensors if e.decisions.tensors[t].write_back is not None}
            return written | {e.computed[op.step]}
        if op.lane == "compute":
            return {e.computations[op.step]}
        # A weight may leave in a later step than that of its update; gradients and activations leave in the step that
        # made them.
        updated = {e.updated[t] for t in op.tensors} if op.payload in ("weight", "state") else set()
        return updated | {e.computed[op.step]}

    def _computation(self, op: Draft) -> set[int]:
        """Its weights and activations are there, and the memory it takes over has been given back."""
        e = self.emitted
        # It allocates what offloads gave back at the end of the step before; no tensor of its own tells it to wait for
        # them.
        waits = set(e.held_until.get((op.step - 1) % len(e.timeline), ()))
        if op.kind == "backward" and not e.profile.blocks[op.block].has_backward:
            return waits  # it does nothing
        for t in e.of_block[op.block]:
            if t not in op.zero_copy:
                waits.update(e.fetches[c] for c in e.copies_of["weight", t] if c in e.fetches and c.covers(op.step))
            # Read in host memory: not before the update, or the copy back, that made it current there.
            elif t in e.current:
                waits.add(e.current[t])
        if e.timeline.is_backward(op.step) and op.block in e.activations_in:
            waits.add(e.activations_in[op.block])
        return waits

    def _prefetch(self, op: Draft) -> set[int]:
        e = self.emitted
        if op.payload == "activation":
            # It writes memory of the framework that the computation before may still be using.
            before = (op.step - 1) % len(e.timeline)
            return {e.activations_out[op.block], e.computed[before], *e.held_until.get(before, ())}
        sources = e.current if op.payload == "weight" else e.states_out
        waits = {sources[t] for t in op.tensors if t in sources}
        # Whoever had the range may still be read, or be on its way out, although its memory counts as given back.
        for copy in e.fetched_by[op.id]:
            waits |= self._former_occupants(copy, op.id)
        return waits

    def _former_occupants(self, copy: PlacedCopy, fetch: int) -> set[int]:
        """Return the releases of the last occupants of the range of ``copy``; these have awaited the earlier ones."""
        low, high = copy.offset, copy.offset + copy.room
        # The plan is cyclic: a release with a higher number is that of the iteration before.
        ago = (fetch - self.released - 1) % len(self.emitted.ops)
        others = np.flatnonzero((self.low < high) & (self.high > low))
        open_ranges = [(low, high)]
        waits: set[int] = set()
        for at in others[np.argsort(ago[others], kind="stable")]:
            left = without(open_ranges, int(self.low[at]), int(self.high[at]))
            if left != open_ranges:
                open_ranges = left
                waits.update(self.releases[at])
            if not open_ranges:
                break
        return waits


def without(ranges: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Return ``ranges`` less ``[low, high)``."""
    parts = []
    for start, end in ranges:
        parts += [(start, min(end, low)), (max(start, high), end)]
    return [(start, end) for start, end in parts if start < end]
