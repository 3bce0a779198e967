"""Faults of what goes between machines."""

from __future__ import annotations

from scripts.mutants.mutant import mutant

HOST_TASK, PASSES = "execute/memory/host_task.py", "execute/training/passes.py"
UNROLLED, DURATIONS = "plan/iteration/passes.py", "plan/iteration/durations.py"
CHECK, WINDOW = "plan/verify/check.py", "plan/assembly/window.py"
BESIDE, MACHINES = "parity/test_beside_backward.py", "unit/plan/test_several.py"

BETWEEN_MACHINES = (
    mutant(
        "sums go between machines before they are complete",
        HOST_TASK,
        "*(group.host_ready for group in groups)]",
        "]",
        BESIDE,
    ),
    mutant(
        "an update does not wait for the other machines",
        HOST_TASK,
        "group.updated_on_host_by(event)",
        "pass",
        BESIDE,
    ),
    mutant(
        "machines add up after every micro-batch",
        PASSES,
        "self._window.last and not self._to_follow",
        "not self._to_follow",
        BESIDE,
    ),
    mutant(
        "a plan sends sums before they are complete",
        WINDOW,
        "if self._overlap(op, self.ops[begins])} | {op.id - 2}",
        "if self._overlap(op, self.ops[begins])}",
        MACHINES,
    ),
    mutant(
        "a plan sends first gradients before they have arrived",
        WINDOW,
        "waits[op.id] = {begins for begins in self._begins if self._overlap(op, self.ops[begins])} | {op.id - 2}",
        "waits[op.id] = {op.id - 2}",
        MACHINES,
    ),
    mutant(
        "a plan's updates do not wait for other machines",
        WINDOW,
        'if op.kind in ("accumulate", "update") or op.id in self._begins:',
        'if op.kind == "accumulate" or op.id in self._begins:',
        MACHINES,
    ),
    mutant(
        "the check takes a plan that sends nothing to other machines",
        CHECK,
        'if wanted and place == "host" and t not in seen:',
        "if False:",
        MACHINES,
    ),
    mutant(
        "the simulator adds up between machines in every pass",
        UNROLLED,
        'if op.kind != "reduce" or at == last_adding',
        "if True",
        MACHINES,
    ),
    mutant(
        "two machines send twice as much as they do",
        DURATIONS,
        "min(2, more) * nbytes / speed",
        "2 * nbytes / speed",
        MACHINES,
    ),
)
