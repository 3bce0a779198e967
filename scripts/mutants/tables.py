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
        "plan/rows.py",
        "                after.add(self.at)  # a pass",
        "                pass  # a pass",
        WINDOWS,
    ),
)
