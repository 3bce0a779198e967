"""Paths as users type them: asking about one never fails, however long or odd it is."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """Return the path ``text``, with ``~`` for the home folder if there is one."""
    try:
        return Path(os.path.expanduser(text))
    except ValueError:  # the system's list of users is asked, which takes no broken characters
        return Path(text)


def is_file(path: str | Path) -> bool:
    """Return whether ``path`` is a file; names that no file can have are none."""
    return os.path.isfile(path)  # unlike Path.is_file, silent about names that are too long


def is_dir(path: str | Path) -> bool:
    """Return whether ``path`` is a folder; names that no folder can have are none."""
    return os.path.isdir(path)
