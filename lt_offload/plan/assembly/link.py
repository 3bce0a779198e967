"""The ops that each op has to wait for: data first, then the ranges of the arena that it writes.

Every dependency names the latest issue of the other op before this one; an id that is not smaller means the iteration
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from lt_offload.plan.assembly.copies import DeviceCopy
from lt_offload.plan.assembly.ops import Draft, Emitter, Ids


def link(emitted: Emitter) -> list[Draft]:
    """Return the ops of ``emitted``, of which it fills in ``after``."""
    linker = _Linker(emitted)
    for op in emitted.ops:
        op.after = tuple(sorted(linker.after(op)))
    return emitted.ops


class _Linker:
    def __init__(self, emitted: Emitter) -> None:
        self.emitted = e = emitted
        self.moving = [copy for copy in e.copies if copy.stay is not None]
        self.releases: list[Ids] = [
            tuple(release for one in e.beside.get(copy, [copy]) for release in e.releases[one]) for copy in self.moving
        ]
        for at, copy in enumerate(self.moving):
            if copy.payload == "state" and copy.stay is not None:
                # Given back at the end of a step, after everything that has been computed until then.
                self.releases[at] += e.computed[copy.stay.end]
        self.low, self.high = np.array([e.range_of(copy) for copy in self.moving], dtype=np.int64).reshape(-1, 2).T
        self.released = np.array([max(releases) for releases in self.releases], dtype=np.int64)
        self.complete = {*e.begins.values(), *e.added.values()} if e.delayed else set()
        """Updates that wait do so for all of these: the norm is that of all gradients."""
        if e.profile.added_up_first:
            self.complete |= {*e.reduced.values()}
        self.complete |= {*e.of_rows[1:]}

    def after(self, op: Draft) -> set[int]:
        """Return the ids of the ops that must have ended before ``op`` starts."""
        if op.kind in ("forward", "backward"):
            return self._computation(op)
        if op.kind == "prefetch":
            return self._prefetch(op)
        e = self.emitted
        if op.rows == "looked up":
            return self._looked_up(op)
        # Other rows wait for the looked up ones of the pass before.
        before = {*e.of_rows[1:]} if op.rows == "others" else set()
        if op.kind in ("update", "accumulate", "reduce"):
            return self._use_of_gradients(op) | before
        if op.payload == "grad":
            return self._gradients(op) | before
        if op.kind == "drop" and op.payload == "weight":
            # Until the last computation has used it and the host has the newest value, nobody may overwrite its range.
            waits = {e.current[t] for t in op.tensors if e.decisions.tensors[t].write_back is not None}
            if e.delayed:  # a settling pass computes nothing: what does was in the pass before
                waits |= {
                    e.computations[e.timeline.backward(b)] for t in op.tensors for b in e.profile.tensors[t].blocks
                }
            return waits | {*e.computed[op.step]}
        # A weight may leave in a later step than that of its update; activations leave in the step that made them.
        updated = {user for t in op.tensors for user in e.changes(t)} if op.payload != "activation" else set()
        return updated | {*e.computed[op.step]}

    def _use_of_gradients(self, op: Draft) -> set[int]:
        e = self.emitted
        if op.kind == "reduce":  # the sums of this machine are complete
            begun = {e.begins[t] for t in op.tensors if t in e.begins}
            return begun | {e.added[t] for t in op.tensors}
        waits = {e.reduced[t] for t in op.tensors if t in e.reduced}
        if op.lane == "host":
            # These have waited for who used the sums in the pass before.
            waits.update(*(e.grads_out[t] for t in op.tensors))
        else:
            waits.update(*(e.fetches[copy] for t in op.tensors for copy in e.copies_of["state", t]))
            waits.add(e.computations[op.step])
        if op.kind == "update" and e.delayed:
            waits |= self.complete
            # No computation of the same pass has waited for these.
            waits.update(*(e.fetches[copy] for t in op.tensors for copy in e.copies_of["weight", t]))
        return waits

    def _looked_up(self, op: Draft) -> set[int]:
        """Rows that are looked up come after all others: sums have the last block's gradient already."""
        e = self.emitted
        out, *used = e.of_rows
        (table,) = op.tensors
        if op.kind == "offload":
            return {e.computations[op.step], *used}
        if op.kind == "update":
            return {out, e.updated[table]}
        return {out, *e.grads_out[table], *e.adds(table), *used, *((e.updated[table],) if e.delayed else ())}

    def _gradients(self, op: Draft) -> set[int]:
        """Gradients leave when they are there, and what came in the pass before has been used."""
        e = self.emitted
        waits = {e.computations[op.step]} if op.lane == "compute" else {*e.computed[op.step]}
        for t in op.tensors:
            if e.begins.get(t) == op.id:
                waits.update(e.users(t), (e.reduced[t],) if t in e.reduced else ())
            else:
                waits.update(e.adds(t))
        return waits

    def _computation(self, op: Draft) -> set[int]:
        """Its weights and activations are there, and the memory it takes over has been given back."""
        e = self.emitted
        # It allocates what offloads gave back at the end of the step before; no tensor of its own tells it to wait for
        # them.
        waits = set(e.held_until.get((op.step - 1) % len(e.timeline), ()))
        if e.table is not None and not op.block:
            # A backward of the first block reads nothing of the table, but the framework holds it meanwhile. A pass
            # that only adds up makes no update that has waited for the copy of the rows' gradient.
            waits.add(e.updated[e.table.index])
            waits.update((*e.of_rows[:1], *self._renewed(e.table.index)) if op.kind == "forward" else ())
        if op.kind == "backward":
            # It writes gradients to the host from its begin on.
            waits.update(*(e.adds(t) for t in e.sets.written[op.step]))
            if not e.profile.blocks[op.block].has_backward:
                return waits  # it does nothing
        for t in e.of_block[op.block]:
            if t not in op.zero_copy:
                for copy in e.copies_of["weight", t]:
                    waits.update(e.fetches[copy] if copy.covers(op.step) else ())
            # Read in host memory: not before the update, or the copy back, that made it current there.
            elif t in e.current:
                waits.add(e.current[t])
        if e.timeline.is_backward(op.step) and op.block in e.activations_in:
            waits.add(e.activations_in[op.block])
        return waits

    def _renewed(self, tensor: int) -> Ids:
        """Return the ops that make a weight's host copy current."""
        e = self.emitted
        by_rows = e.table is not None and e.table.index == tensor and not e.delayed
        return (e.current[tensor], *(e.of_rows[-1:] if by_rows else ()))

    def _prefetch(self, op: Draft) -> set[int]:
        e = self.emitted
        if op.payload == "activation":
            # It writes memory of the framework that the computation before may still be using.
            before = (op.step - 1) % len(e.timeline)
            return {e.activations_out[op.block], *e.computed[before], *e.held_until.get(before, ())}
        waits: set[int] = set()
        for t in op.tensors:
            if op.payload != "weight":
                waits.update(e.states_out.get(t, ()))
            elif t in e.current:
                waits.update(self._renewed(t))
        # Whoever had the range may still be read, or be on its way out, although its memory counts as given back.
        for copy in e.fetched_by[op.id]:
            waits |= self._former_occupants(copy, op.id)
        return waits

    def _former_occupants(self, copy: DeviceCopy, fetch: int) -> set[int]:
        """Return the releases of the last occupants of the range of ``copy``; these have awaited the earlier ones."""
        low, high = self.emitted.range_of(copy)
        others = np.flatnonzero((self.low < high) & (self.high > low))
        if self.emitted.delayed:  # the last one was not there, perhaps, in a settling pass
            return {release for at in others for release in self.releases[at]}
        # The plan is cyclic: a release with a higher number is that of the iteration before.
        ago = (fetch - self.released - 1) % len(self.emitted.ops)
        latest = others[np.argsort(ago[others], kind="stable")]
        formers = ((int(self.low[at]), int(self.high[at]), self.releases[at]) for at in latest)
        return set().union(*last_occupants(low, high, formers))


def last_occupants(low: int, high: int, formers: Iterable[tuple[int, int, Ids]]) -> Iterator[Ids]:
    """Yield the ops of those that were the last in some part of ``[low, high)``.

    ``formers``: ranges with ops, the latest first.
    """
    open_ranges = [(low, high)]
    for start, end, ops in formers:
        parts = [part for a, b in open_ranges for part in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in parts if a < b]
        if left != open_ranges:
            open_ranges = left
            yield ops
        if not open_ranges:
            return
