"""Faults of what goes between machines."""

from __future__ import annotations

from scripts.mutants.mutant import mutant

HOST_TASK, PASSES = "execute/memory/host_task.py", "execute/training/passes.py"
UNROLLED, DURATIONS = "plan/iteration/passes.py", "plan/iteration/durations.py"
CHECK, LINK = "plan/verify/check.py", "plan/assembly/link.py"
BESIDE, MACHINES = "parity/test_beside_backward.py", "unit/plan/test_several.py"

BETWEEN_MACHINES = (
    mutant(
        "sums go between machines before they are complete",
        HOST_TASK,
        "distinct([*self.after, *complete_on_host(groups)])",
        "distinct(self.after)",
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
        LINK,
        "return begun | {e.added[t] for t in op.tensors}",
        "return begun",
        MACHINES,
    ),
    mutant(
        "a plan sends first gradients before they have arrived",
        LINK,
        "return begun | {e.added[t] for t in op.tensors}",
        "return {e.added[t] for t in op.tensors}",
        MACHINES,
    ),
    mutant(
        "a plan's updates do not wait for other machines",
        LINK,
        "waits = {e.reduced[t] for t in op.tensors if t in e.reduced}",
        'waits = {e.reduced[t] for t in op.tensors if t in e.reduced and op.kind == "accumulate"}',
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
        'if op.lane != "network" or at == last_adding',
        "if True",
        MACHINES,
    ),
    mutant(
        "two machines send twice as much as they do",
        DURATIONS,
        "return more * nbytes / speed",
        "return 2 * nbytes / speed",
        MACHINES,
    ),
)
