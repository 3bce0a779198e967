"""What each op of an emitted iteration waits for: data first, then the arena ranges it writes.

Every dependency names the latest issue of the other op before this one; an id that is not smaller means the iteration
before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lt_offload.plan.build.copies import DeviceCopy
from lt_offload.plan.build.ops import Draft, Emitter


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
