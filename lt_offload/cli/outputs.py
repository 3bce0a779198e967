"""Outputs of verbs: tables in the terminal, and files and folders, which are tried before anything slow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from lt_offload.errors import ConfigError
from lt_offload.resources import is_dir, is_file, user_path


def check_output(path: str | Path, setting: str, *, make: bool = False, new: bool = False) -> None:
    """Raise ``ConfigError``, which names ``setting``, unless a file can be written at ``path``.

    ``make``: its folder will be made where there is none; ``new``: there must be no file yet.
    """
    target = user_path(path)
    if is_dir(target):
        raise ConfigError(f"{setting}: cannot write {target}: it is a folder; add the name of a file")
    if new and is_file(target):
        raise ConfigError(f"{setting}: {target} exists already; give another name, or remove it first")
    folder = target.parent
    if make:
        folder = next(above for above in (folder, *folder.absolute().parents) if os.path.exists(above))
    if not is_dir(folder):
        why = "is a file" if os.path.exists(folder) else "does not exist"
        raise ConfigError(f"{setting}: cannot write {target}: there is no folder {folder}, it {why}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: cannot write {target}: the folder {folder} is read-only for you")


def make_folder(path: str | Path, setting: str) -> Path:
    """Make the folder ``path`` where there is none, and return it; ``ConfigError`` if nothing can be written there."""
    target = user_path(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        # A file is written to find out: bits of permission do not tell of a file system that is read-only or full.
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting}={str(path)!r} cannot be written: {error.strerror}; choose another folder"
        ) from None
    return target


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, words: bool = False) -> None:
    """Print a table that is at most ``width`` columns wide; the last column is of ``words``, not of figures."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, title in enumerate(head):
        left = at == 0 or (words and at == len(head) - 1)
        table.add_column(Text(title), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, width=width).print(table)
