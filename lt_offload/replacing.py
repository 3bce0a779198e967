"""Files and folders that are there as a whole or not at all, whoever is killed or writes the same meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target`` to write a file or a folder to, which takes its place at the end.

    After an exception ``target`` is as it was, and nothing is left of what was written.

    Raises:
        OSError: if there is no room beside ``target``, or it is a folder that is not empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a file cannot be renamed into another file system.
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        written = Path(folder) / target.name
        yield written
        written.replace(target)
