"""Files and folders that are there as a whole or not at all, whoever is killed or writes the same meanwhile.

What is written is a part beside its target, under a name of its own, which the process that writes it has locked. A
lock ends with its process, however that ends: a part without one is left over from a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lt_offload.errors import ConfigError

SUFFIX = ".lt_offload-partial"
"""The end of names of parts; partial files of other programs are not touched."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target`` to write a file or a folder to, which takes its place at the end.

    After an exception ``target`` is as it was, and nothing is left of what was written.

    Raises:
        OSError: if there is no room beside ``target``, or it is a folder that is not empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    # Beside the target: a file cannot be renamed into another file system.
    part, descriptor = new_part(target, new_folder)
    try:
        yield part / target.name
        (part / target.name).replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(descriptor)


def save_text(path: str | Path, text: str, *, new: bool = False) -> Path:
    """Write ``text`` to ``path`` in UTF-8 as a whole, making its folder, and return the path.

    Whoever reads it meanwhile reads the old text or the new one. Links stay; pipes and devices are written to.

    Raises:
        ConfigError: if it cannot be written; the file that was there is as it was.
        FileExistsError: if it must be ``new``, and there is something already.
    """
    target = Path(path)
    if new:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.close(new_file(target))  # nobody else takes the name meanwhile
    if target.is_dir():
        raise ConfigError(f"path={str(path)!r} is a folder; add the name of a file")
    try:
        with writing(target):
            if target.exists() and not target.is_file():  # /dev/stdout
                target.write_text(text, encoding="utf-8")
            else:
                with replacing(target.resolve()) as part:
                    part.write_text(text, encoding="utf-8")
    except BaseException:
        if new:
            target.unlink()
        raise
    return target


@contextmanager
def writing(what: str | Path, way_out: str = "make room, or choose another folder") -> Iterator[None]:
    """Raise ``ConfigError`` for errors of the system within the context: ``what`` cannot be written, ``way_out``.

    ``what`` is a path, or a setting with its value.
    """
    try:
        yield
    except OSError as error:
        named = repr(str(what)) if isinstance(what, Path) else what
        raise ConfigError(f"{named} cannot be written: {error.strerror or error}; {way_out}") from error


# -- parts ------------------------------------------------------------------------------------------------------------


def new_part(target: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Return the path and the descriptor of a new part for ``target``, which this process has locked.

    ``make`` is :func:`new_file` or :func:`new_folder`. Closing the descriptor gives up the lock. On file systems that
    have none it is not locked, and what is left over stays.
    """
    while True:
        # No number of a process: containers and machines that share a disk have the same ones.
        part = target.with_name(f".{target.name:.50}.{uuid.uuid4().hex:.12}{SUFFIX}")
        descriptor = make(part)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), part.stat()):
                return part, descriptor
        os.close(descriptor)  # another process took the new part for a leftover before it was locked


def new_file(path: Path) -> int:
    """Return the descriptor of the new file ``path``."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def new_folder(path: Path) -> int:
    """Return the descriptor of the new folder ``path``, which is closed to others."""
    while True:
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # taken for a leftover at once
            return os.open(path, os.O_RDONLY)


def remove_leftovers(folder: Path) -> None:
    """Remove the parts in ``folder`` that processes of this user left when they were killed."""
    for part in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):  # a living process writes it, another one has been faster, or there are no locks
            _remove_leftover(part)


def _remove_leftover(part: Path) -> None:
    seen = part.lstat()
    if not (stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)) or seen.st_uid != os.geteuid():
        return
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(seen.st_mode):
            shutil.rmtree(part)
        else:
            part.unlink()
    finally:
        os.close(descriptor)
