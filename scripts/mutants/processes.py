"""Faults of updates that run beside the backward in several processes."""

from __future__ import annotations

from scripts.mutants.mutant import mutant

ARRIVALS, COMMON = "execute/updates/arrivals.py", "execute/memory/common.py"
DECISIONS, DURATIONS = "plan/iteration/decisions.py", "plan/iteration/durations.py"
ORDER, PLANS = "parity/several/test_adding.py", "unit/plan/test_several.py"

IN_PROCESSES = (
    mutant(
        "a process says that its gradients are there before they are",
        ARRIVALS,
        "[*(arrived.pop(w.index) for w in here), ",
        "[*(arrived.pop(w.index) for w in here if not w), ",
        ORDER,
    ),
    mutant(
        "an update does not wait for other processes' gradients",
        ARRIVALS,
        "after=[awaited]",
        "after=[]",
        ORDER,
    ),
    mutant(
        "a gradient is overwritten before its owner has read it",
        ARRIVALS,
        "self._slots.updated(op.id, event)",
        "self._slots.updated(op.id, own)",
        ORDER,
    ),
    mutant(
        "what another process updates is fetched before that",
        COMMON,
        "task.groups, task.writes = [*groups], [*cells]",
        "task.groups, task.writes = [], [*cells]",
        ORDER,
    ),
    mutant(
        "a process without a gradient leaves what was there", ARRIVALS, "[place.zero_ for place in empty]", "[]", ORDER
    ),
    mutant(
        "a weight is updated that no process has a gradient for",
        ARRIVALS,
        "if not any(part.given() for part in owned):",
        "if False:",
        ORDER,
    ),
    mutant("owners add up for nothing", DURATIONS, 'if op.kind == "update" and op.lane == "host":', "if False:", PLANS),
    mutant(
        "a weight stays on the device after its update on the host",
        DECISIONS,
        "stays.append(Interval(start=stay.start, end=last if around else min(stay.end, last)))",
        "stays.append(stay)",
        PLANS,
    ),
)
