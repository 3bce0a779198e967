"""Makes decisions take less device memory, at the price of time: copies get less room to run beside computations.

Whole tensors need more memory than the fractions they were rounded from, in a few steps. Only those steps are touched:
memory on the way out is given back earlier there, and memory on the way in is taken later. Knows nothing of offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lt_offload.plan.build.copies import device_copies
from lt_offload.plan.build.flexible import FlexibleStay, with_stays
from lt_offload.plan.build.groups import CUTS, runs
from lt_offload.plan.iteration.arena import live_bytes
from lt_offload.plan.iteration.decisions import Decisions
from lt_offload.plan.iteration.memory import backward_steps, framework_bytes
from lt_offload.schema.profile import Profile


def squeeze_framework(decisions: Decisions, profile: Profile, limit: int) -> Decisions:
    """Return ``decisions`` with the framework's peak at ``limit`` bytes, or as near above it as possible."""
    used = framework_bytes(decisions.usage, profile)
    if used.max() <= limit:
        return decisions
    holds = list(_holds(decisions, profile))
    if not holds:
        return decisions
    first, last, sizes = (np.array(column, dtype=np.int64) for column in zip(*(h.span for h in holds), strict=True))
    arriving = np.array([hold.kind == "in" for hold in holds])
    while used.max() > limit:
        step = int(used.argmax())
        here = np.flatnonzero((first <= step) & (step <= last))
        if not len(here):
            break
        # The smallest that is enough, else the largest.
        enough = here[sizes[here] >= int(used[step]) - limit]
        at = int(enough[sizes[enough].argmin()] if len(enough) else here[sizes[here].argmax()])
        if arriving[at]:
            used[first[at] : step + 1] -= sizes[at]
            first[at] = step + 1
        else:
            used[step : last[at] + 1] -= sizes[at]
            last[at] = step - 1
    tensors, blocks = list(decisions.tensors), list(decisions.blocks)
    for hold, begin, end in zip(holds, first.tolist(), last.tolist(), strict=True):
        if hold.kind == "grad":
            tensors[hold.index] = replace(tensors[hold.index], grad_release_after=end)
        elif hold.kind == "out":
            blocks[hold.index] = replace(blocks[hold.index], release_after=end)
        else:
            blocks[hold.index] = replace(blocks[hold.index], prefetch_at=begin)
    return replace(decisions, tensors=tuple(tensors), blocks=tuple(blocks))


@dataclass(frozen=True, slots=True)
class _Held:
    """A gradient or activations on the way out, held to the end of a step, or activations held from the start of one.

    The span is the first and last step for which they need not be held, and their bytes.
    """

    kind: Literal["grad", "out", "in"]
    index: int
    span: tuple[int, int, int]


def _holds(decisions: Decisions, profile: Profile) -> Iterator[_Held]:
    for t, (tensor, decision) in enumerate(zip(profile.tensors, decisions.tensors, strict=True)):
        if decision.grad_release_after is not None:
            complete = backward_steps(tensor.blocks, profile)[-1]
            yield _Held("grad", t, (complete + 1, decision.grad_release_after, tensor.bytes))
    for index, (block, chosen) in enumerate(zip(profile.blocks, decisions.blocks, strict=True)):
        if chosen.release_after is not None and chosen.prefetch_at is not None:
            nbytes = block.option(chosen.option).offload_bytes
            yield _Held("out", index, (index + 1, chosen.release_after, nbytes))
            yield _Held("in", index, (chosen.prefetch_at, decisions.activations_needed(index) - 1, nbytes))


def squeeze_arena(decisions: Decisions, profile: Profile, limit: int) -> Decisions:
    """Return ``decisions`` with the peak of live arena bytes at ``limit``, or as near above it as possible."""
    steps = 2 * len(profile.blocks)
    copies = device_copies(decisions, profile)
    live = live_bytes([copy.lifetime(steps) for copy in copies], steps)
    parts = runs(copies, decisions, profile, cut=CUTS[-1])
    intervals = [FlexibleStay(part, decisions, profile) for part in parts if part.interval is not None]
    while live.max() > limit:
        step = int(live.argmax())
        over = int(live[step]) - limit
        moves = [
            (cost, interval.run.room, at, late)
            for at, interval in enumerate(intervals)
            for cost, late in interval.moves(step)
        ]
        if not moves:
            break
        # The shortest delay first; of those the smallest buffer that is enough, else the largest.
        _, room, at, late = min(moves, key=lambda m: (m[0], m[1] < over, m[1] if m[1] >= over else -m[1]))
        live[intervals[at].shorten(step, late)] -= room
    return with_stays(decisions, copies, intervals)
