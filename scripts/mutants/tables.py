"""Faults of tables that are updated in two parts."""

from __future__ import annotations

from scripts.mutants.mutant import mutant

TABLES, GRADIENTS = "execute/updates/tables.py", "execute/updates/gradients.py"
WINDOWS = "parity/tables/test_windows.py"

IN_TWO_PARTS = (
    mutant(
        "what a sum has for rows that are looked up is not added to",
        TABLES,
        "            if filled:\n                kept = self._kept_sums",
        "            if False:\n                kept = self._kept_sums",
        WINDOWS,
    ),
    mutant(
        "rows of a sum that has begun are not set aside",
        GRADIENTS,
        "        table.begun, table.filled = True, False\n",
        "        table.begun, table.filled = False, False\n",
        WINDOWS,
    ),
    mutant(
        "the sum of a table is not used up",
        GRADIENTS,
        "            total.use_up() if updating else total.fill()\n        self.updated += updating",
        "            total.fill()\n        self.updated += updating",
        WINDOWS,
    ),
    mutant(
        "an update adds to a sum that is not there",
        GRADIENTS,
        "            table.begun, table.filled = False, _filled(weight)\n",
        "            table.begun, table.filled = False, self._which != 'updating'\n",
        WINDOWS,
    ),
    mutant(
        "a pass takes device memory that rows of the pass before may still be in",
        "plan/assembly/link.py",
        "*e.of_rows[:1], *self._renewed(e.table.index)",
        "*self._renewed(e.table.index),",
        WINDOWS,
    ),
    mutant(
        "a table is fetched when its other rows have been updated, without those that are looked up",
        "plan/assembly/link.py",
        "*(e.of_rows[-1:] if by_rows else ())",
        "*()",
        WINDOWS,
    ),
    mutant(
        "a table is fetched in the iteration that updates it, before its last rows are there",
        "plan/rows.py",
        'if early and "settling" not in passes:',
        "if False:",
        WINDOWS,
    ),
    mutant(
        "gradients that the backward writes to the host count as if they stayed",
        "plan/iteration/memory.py",
        " - grads.written[at] + grads.scratch[at])",
        " + grads.scratch[at])",
        "unit/assembly/test_plan_reruns.py",
    ),
    mutant(
        "copies that leave before the loss count beside it",
        "plan/iteration/memory.py",
        "    return total - _gone_before_the_loss(used, profile, time)\n",
        "    return total\n",
        "unit/assembly/test_plan_reruns.py",
    ),
)
