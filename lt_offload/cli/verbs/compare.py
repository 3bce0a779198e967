"""``lt-finetune compare``: runs beside each other, without torch."""

from __future__ import annotations

from rich.console import Console

from lt_offload.cli.outputs import print_table
from lt_offload.report.compare import read_runs, tables, trajectories

_WIDTH = 80


def compare(*runs: str) -> int:
    """Compare runs: settings that differ, losses, speed, memory, plans, and whether they are the same bit for bit.

    Args:
        runs: run folders, two or more, or one that was resumed: then its parts.
    """
    read = read_runs(runs)
    console = Console(highlight=False)
    width = min(console.width, max(_WIDTH, 26 * (len(runs) + 1)))
    for title, rows in tables(read).items():
        if rows:
            print_table([title, *read], [(name, *values) for name, values in rows.items()], width=width)
            print()
    warnings = [f"{name}: {warning}" for name, run in read.items() for warning in run.warnings]
    for sentence in (*(trajectories(read) if len(runs) > 1 else ()), *warnings):
        console.print(sentence, markup=False)
    return 0
