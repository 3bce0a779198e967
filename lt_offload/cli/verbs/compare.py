"""``lt-finetune compare``: runs beside each other, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from lt_offload.cli.outputs import check_output

_WIDTH = 80


def compare(*runs: str, save: str | None = None) -> int:
    """Compare runs: settings that differ, losses, speed, memory, plans, and whether they are the same bit for bit.

    Args:
        runs: run folders, two or more.
        save: HTML page to write, with their curves over each other.
    """
    if save is not None:
        check_output(save, "--save", make=True)
    from rich.console import Console

    from lt_offload.report.compare import (
        MOST_SETTINGS,
        figures,
        plan_differences,
        read_runs,
        setting_differences,
        trajectories,
        write_comparison,
    )

    found = read_runs(runs)
    console = Console(highlight=False)
    width = min(console.width, max(_WIDTH, 26 * (len(runs) + 1)))
    heads = found.labels
    if heads != found.names:
        for head, name in zip(heads, found.names, strict=True):
            console.print(f"{head}  {name}", markup=False, soft_wrap=True)
        console.print()
    _print(console, "", heads, figures(found), width)
    settings = setting_differences(found)
    if settings:
        _print(console, "settings that differ", heads, settings[:MOST_SETTINGS], width)
        if len(settings) > MOST_SETTINGS:
            console.print(f"... and {len(settings) - MOST_SETTINGS} more")
    else:
        console.print("No setting differs.\n")
    _print(console, "plans that differ", heads, plan_differences(found), width)
    for sentence in trajectories(found):
        console.print(sentence, markup=False)
    for name, run in zip(found.names, found.runs, strict=True):
        for warning in run.warnings:
            console.print(f"{name}: {warning}", markup=False)
    if save is not None:
        print(f"page: {write_comparison(save, found)}")
    return 0


def _print(
    console: object, title: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int
) -> None:
    """Print a table at most ``width`` wide."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    if not rows:
        return
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column(Text(title), overflow="fold")
    for head in heads:
        shown.add_column(Text(head), justify="right", overflow="fold")
    for name, values in rows:
        shown.add_row(Text(name), *(Text(value) for value in values))
    console.print(shown, width=width)
    console.print()
