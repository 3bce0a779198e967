"""Writes the ops of an iteration in issue order, and links each to what it has to wait for.

These are drafts: they name tensors. Which of those travel together is known once all ops are there; see ``groups.py``.
What an op waits for is data first, then the ranges of the arena that it writes. Every dependency names the latest issue
of the other op before this one; an id that is not smaller means the iteration before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lt_offload.plan.assembly.copies import DeviceCopy, in_parts
from lt_offload.plan.iteration.computations import Computation, computations
from lt_offload.plan.iteration.decisions import Decisions, copy_uses
from lt_offload.plan.iteration.memory import backward_steps
from lt_offload.plan.iteration.timeline import timeline
from lt_offload.schema.lanes import LaneName, OpKind
from lt_offload.schema.plan import Payload, Save
from lt_offload.schema.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """An op that names tensors, one by one; else the fields are those of :class:`lt_offload.schema.plan.Op`."""

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
    """Of gradients that are copied: where they arrive."""
    bytes: int = 0
    after: tuple[int, ...] = ()
    release_after: int | None = None
    save: Save | None = None
    zero_copy: tuple[int, ...] = ()
    """For computations: the tensors that they read in host memory."""


class Emitter:
    """The ops of ``decisions`` in issue order, after :meth:`emit`, and the maps that linking them needs."""

    def __init__(
        self,
        decisions: Decisions,
        profile: Profile,
        copies: Sequence[DeviceCopy],
        activation_turns: Mapping[int, int] | None = None,
    ) -> None:
        self.decisions, self.profile, self.copies = decisions, profile, copies
        self.scheduled = activation_turns is not None
        """Whether the copies have turns."""
        self._activation_turns = activation_turns or {}
        self.timeline = timeline(profile)
        self.ops: list[Draft] = []
        self.fetched_by: dict[int, list[DeviceCopy]] = {}
        """By prefetch op of weights or states: what it brings."""
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
        self.completed_at: dict[int, list[int]] = defaultdict(list)
        """By step: the tensors whose gradients it completes."""
        for index, tensor in enumerate(profile.tensors):
            for block in tensor.blocks:
                self.of_block[block].append(index)
            if tensor.trainable:
                self.completed_at[backward_steps(tensor.blocks, profile)[-1]].append(index)
        self.copies_of: dict[tuple[str, int], list[DeviceCopy]] = defaultdict(list)
        self._computations: dict[int, list[Computation]] = defaultdict(list)
        for computation in computations(
            [block.option for block in decisions.blocks], decisions.recomputations, profile
        ):
            self._computations[computation.step].append(computation)
        self._fetched_at: dict[int, list[DeviceCopy]] = defaultdict(list)
        self._released_at: dict[int, list[DeviceCopy]] = defaultdict(list)
        for copy in copies:
            self.copies_of[copy.payload, copy.tensor].append(copy)
            if copy.interval is not None:
                self._fetched_at[copy.interval.start].append(copy)
                self._released_at[copy.interval.end].append(copy)

    def emit(self) -> None:
        """Write every op."""
        for step in range(len(self.timeline)):
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
        found: dict[tuple[int, int, int, int, bool], list[DeviceCopy]] = defaultdict(list)
        for block, decision in enumerate(self.decisions.blocks):
            if decision.prefetch_at == step:
                wait = self.decisions.activations_needed(block, self.profile) - step
                found[self._activation_turns.get(block, 0), wait, block, 0, False] = []
        for copy in self._fetched_at[step]:
            block, wait = self._need(copy, step)
            # What waits for an update on the host does not delay the rest.
            on_host = copy.payload == "weight" and self.decisions.tensors[copy.tensor].place == "host"
            found[copy.turn, wait, block, 1 if copy.payload == "weight" else 2, on_host].append(copy)
        for (_, _, block, _, _), copies in sorted(found.items()):
            if not copies:
                nbytes = self._offloaded(block)
                self.activations_in[block] = self._copy("prefetch", step, block, "activation", nbytes=nbytes)
                continue
            fetch = self._copy("prefetch", step, block, copies[0].payload, copies)
            self.fetched_by[fetch] = copies
            for copy in copies:
                copy.fetch = fetch

    def _need(self, copy: DeviceCopy, step: int) -> tuple[int, int]:
        """Return the block that needs ``copy`` first from ``step`` on, and how many steps later."""
        blocks = self.profile.tensors[copy.tensor].blocks
        if copy.payload == "state":
            candidates = backward_steps(blocks, self.profile)[-1:]
        else:
            candidates = copy_uses(copy.tensor, self.decisions, self.profile)
        need = min(candidates, key=lambda use: (use - step) % len(self.timeline))
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
        ready = self.completed_at[step]
        for place in ("device", "paged"):
            self._update(step, [t for t in ready if self.decisions.tensors[t].place == place], "compute")
        written = [t for t in ready if self.decisions.tensors[t].grad_zero_copy]
        self._write_gradients(step, written)
        by_until: dict[tuple[int, int], list[int]] = defaultdict(list)
        copied = [t for t in ready if self.decisions.tensors[t].grad_release_after is not None]
        for number, part in enumerate(self._parts(copied)):
            for t in part:
                by_until[self.decisions.tensors[t].grad_release_after or step, number].append(t)
        for (release_after, _), tensors in sorted(by_until.items()):
            block, nbytes = self.timeline.block(step), self._bytes(tensors)
            out = self._copy(
                "offload", step, block, "grad", tensors=tensors, nbytes=nbytes, release_after=release_after
            )
            self.held_until[release_after].append(out)
            self.grads_out.update(dict.fromkeys(tensors, out))
        for tensors in (written, *(tensors for _, tensors in sorted(by_until.items()))):
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
        release_after = None if self.timeline.is_backward(step) else self.decisions.blocks[block].release_after
        if release_after is not None:
            nbytes = self._offloaded(block)
            out = self._copy("offload", step, block, "activation", nbytes=nbytes, release_after=release_after)
            self.held_until[release_after].append(out)
            self.activations_out[block] = out

    def _write_backs(self, step: int) -> None:
        found: dict[int, list[int]] = defaultdict(list)
        for t, decision in enumerate(self.decisions.tensors):
            if decision.write_back == step:
                found[self.profile.tensors[t].blocks[0]].append(t)
        for block, leaving in sorted(found.items()):
            for tensors in self._parts(leaving):
                out = self._copy("offload", step, block, "weight", tensors=tensors, nbytes=self._bytes(tensors))
                self.current.update(dict.fromkeys(tensors, out))

    def _state_offloads(self, step: int) -> None:
        found: dict[tuple[int, int], list[DeviceCopy]] = defaultdict(list)
        for t, decision in enumerate(self.decisions.tensors):
            if decision.state_offload_after == step and decision.state_interval is not None:
                found[self.profile.tensors[t].blocks[0], decision.state_interval.end] += self.copies_of["state", t]
        for (block, release_after), leaving in sorted(found.items()):
            for tensors in self._parts([copy.tensor for copy in leaving]):
                copies = [copy for copy in leaving if copy.tensor in tensors]
                nbytes = sum(copy.bytes for copy in copies)
                out = self._copy(
                    "offload", step, block, "state", tensors=tensors, nbytes=nbytes, release_after=release_after
                )
                self.states_out.update(dict.fromkeys(tensors, out))
                for copy in copies:
                    copy.releases = [out]

    def _parts(self, tensors: list[int]) -> list[list[int]]:
        """Return ``tensors`` as they leave: what is large alone if copies wait for its range, else all together."""
        return in_parts(tensors, self.profile) if self.scheduled else [tensors]

    def _drops(self, step: int) -> None:
        found: dict[tuple[int, int], list[DeviceCopy]] = defaultdict(list)
        for copy in self._released_at[step]:
            if copy.payload == "weight":
                # What waits for a write-back does not delay the rest.
                waits = 0
                if self.decisions.tensors[copy.tensor].write_back is not None:
                    waits = self.current.get(copy.tensor, 0) + 1 if self.scheduled else 1
                found[self.profile.tensors[copy.tensor].blocks[0], waits].append(copy)
        for (block, _), copies in sorted(found.items()):
            tensors = [copy.tensor for copy in copies]
            drop = self._add("drop", step, block, "none", "weight", tensors=tensors, nbytes=self._bytes(tensors))
            for copy in copies:
                copy.releases = [drop]

    def _copy(
        self,
        kind: OpKind,
        step: int,
        block: int,
        payload: Payload,
        copies: Sequence[DeviceCopy] = (),
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

    def _offloaded(self, block: int) -> int:
        return self.profile.blocks[block].option(self.decisions.blocks[block].option).offload_bytes


def link(emitted: Emitter) -> tuple[Draft, ...]:
    """Return the ops of ``emitted`` with ``after`` filled in."""
    linker = _Linker(emitted)
    return tuple(replace(op, after=tuple(sorted(linker.after(op)))) for op in emitted.ops)


class _Linker:
    def __init__(self, emitted: Emitter) -> None:
        self.emitted = emitted
        for copy in emitted.copies:
            if copy.payload == "state" and copy.interval is not None:
                # Given back at the end of a step, after everything that has been computed until then.
                copy.releases.append(emitted.computed[copy.interval.end])
        self.moving = [copy for copy in emitted.copies if copy.interval is not None]
        self.low = np.array([copy.offset for copy in self.moving], dtype=np.int64)
        self.high = np.array([copy.offset + copy.room for copy in self.moving], dtype=np.int64)
        self.released = np.array([max(copy.releases) for copy in self.moving], dtype=np.int64)

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
            fetched = {copy.fetch for t in op.tensors for copy in e.copies_of["state", t] if copy.fetch is not None}
            return fetched | {e.computations[op.step]}
        if op.kind == "drop":
            written = {e.current[t] for t in op.tensors if e.decisions.tensors[t].write_back is not None}
            return written | {e.computed[op.step]}
        if op.lane == "compute":
            return {e.computations[op.step]}
        updated = {e.updated[t] for t in op.tensors} if op.payload in ("weight", "state") else set()
        return updated | {e.computed[op.step]}

    def _computation(self, op: Draft) -> set[int]:
        """Its weights and activations are there, and the memory it takes over has been given back."""
        e = self.emitted
        found = set(e.held_until.get((op.step - 1) % len(e.timeline), ()))
        if op.kind == "backward" and not e.profile.blocks[op.block].has_backward:
            return found  # it does nothing
        for t in e.of_block[op.block]:
            if t not in op.zero_copy:
                found.update(c.fetch for c in e.copies_of["weight", t] if c.fetch is not None and c.covers(op.step))
            elif t in e.current:
                found.add(e.current[t])
        if e.timeline.is_backward(op.step) and op.block in e.activations_in:
            found.add(e.activations_in[op.block])
        return found

    def _prefetch(self, op: Draft) -> set[int]:
        e = self.emitted
        if op.payload == "activation":
            # It writes memory of the framework that the computation before may still be using.
            before = (op.step - 1) % len(e.timeline)
            return {e.activations_out[op.block], e.computed[before], *e.held_until.get(before, ())}
        sources = e.current if op.payload == "weight" else e.states_out
        found = {sources[t] for t in op.tensors if t in sources}
        for copy in e.fetched_by[op.id]:
            found |= self._former_occupants(copy, op.id)
        return found

    def _former_occupants(self, copy: DeviceCopy, fetch: int) -> set[int]:
        """Return the releases of those that had the range of ``copy`` last; earlier ones were awaited by them."""
        low, high = copy.offset, copy.offset + copy.room
        ago = (fetch - self.released - 1) % len(self.emitted.ops)
        others = np.flatnonzero((self.low < high) & (self.high > low))
        open_ranges = [(low, high)]
        found: set[int] = set()
        for at in others[np.argsort(ago[others], kind="stable")]:
            left = without(open_ranges, int(self.low[at]), int(self.high[at]))
            if left != open_ranges:
                open_ranges = left
                found.update(self.moving[at].releases)
            if not open_ranges:
                break
        return found


def without(ranges: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Return ``ranges`` less ``[low, high)``."""
    found = []
    for start, end in ranges:
        found += [(start, min(end, low)), (max(start, high), end)]
    return [(start, end) for start, end in found if start < end]
