"""Outputs of verbs: tables in the terminal, and files and folders, which are tried before anything slow."""

from __future__ import annotations

import atexit
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from lt_offload.errors import ConfigError
from lt_offload.replacing import writing
from lt_offload.resources import is_dir, user_path

_claims: set[int] = set()
"""Descriptors of the folders that this process has claimed."""


def check_output(path: str | Path, setting: str, *, make: bool = False, new: bool = False) -> None:
    """Raise ``ConfigError``, which names ``setting``, unless a file can be written at ``path``.

    ``make``: its folder will be made where there is none; ``new``: there must be no file yet.
    """
    target = user_path(path)
    if is_dir(target):
        raise ConfigError(f"{setting}: cannot write {target}: it is a folder; add the name of a file")
    if new and os.path.lexists(target):
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
    with writing(f"{setting}={str(path)!r}", "choose another folder"):
        target.mkdir(parents=True, exist_ok=True)
        # A file is written to find out: bits of permission do not tell of a file system that is read-only or full.
        with tempfile.TemporaryFile(dir=target):
            pass
    return target


def new_run(recipe: str) -> Path:
    """Make the folder of a new run in ``runs``, called after the ``recipe`` and this second; return its path.

    Of runs that begin in the same second the later ones are called after the next ones. The folder goes when this
    process ends if nothing was put into it. Where none can be made, :func:`make_folder` says why.
    """
    second = datetime.now()
    while True:
        folder = Path("runs", f"{recipe}-{second:%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
        except OSError:
            if not os.path.lexists(folder):
                return folder
        else:
            atexit.register(_remove_empty, folder.absolute())
            return folder
        second += timedelta(seconds=1)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def claimed(folder: Path, setting: str) -> Iterator[None]:
    """Keep runs of other processes out of ``folder`` within the context; ``ConfigError`` if there is one.

    The claim ends with this process, however it ends. There is none on file systems without locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _claims.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{setting}={str(folder)!r}: a run in this folder has not ended; wait for it, or choose another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        if descriptor in _claims:
            _claims.remove(descriptor)
            os.close(descriptor)


def _leave_claims() -> None:
    """Leave the claims to the process that this one was forked from: a worker may outlive it."""
    while _claims:
        os.close(_claims.pop())


os.register_at_fork(after_in_child=_leave_claims)


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
