"""Tables in the terminal: names on the left, figures to the right of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, words: bool = False) -> None:
    """Print a table that is at most ``width`` columns wide; the last column is of ``words``, not of figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, title in enumerate(head):
        left = at == 0 or (words and at == len(head) - 1)
        table.add_column(Text(title), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, width=width).print(table)
