"""Files and folders that are there as a whole or not at all, whoever is killed or writes the same meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lt_offload.errors import ConfigError


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


def save_text(path: str | Path, text: str) -> Path:
    """Write ``text`` to ``path`` as a whole, making its folder, and return the path.

    Raises:
        ConfigError: if it cannot be written; the file that was there is as it was.
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"path={str(path)!r} is a folder; add the name of a file")
    with writing(target):
        # What is no plain file, such as a link or /dev/stdout, stays what it is.
        if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
            target.write_text(text, encoding="utf-8", newline="")
        else:
            with replacing(target) as new:
                new.write_text(text, encoding="utf-8", newline="")
    return target


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise ``ConfigError``, which names ``target``, for errors of the system within the context."""
    try:
        yield
    except OSError as error:
        way_out = "make room, or choose another folder"
        raise ConfigError(f"{str(target)!r} cannot be written: {error.strerror or error}; {way_out}") from error
