"""Files by name: recipes and configs that come with the package, and paths as users type them."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_root() -> Path:
    """Return the folder with ``recipes`` and ``configs``: in a wheel the package, in a source tree the one above it."""
    return _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent


def shipped_files(folder: str, suffix: str) -> dict[str, Path]:
    """Return the files of ``folder``, e.g. ``configs/hardware``, by name without ``suffix``, in alphabetical order."""
    return {path.name.removesuffix(suffix): path for path in sorted((shipped_root() / folder).glob(f"*{suffix}"))}


def user_cache(folder: str) -> Path:
    """Return the path of this package's cache ``folder``, which may not exist yet and can be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lt_offload" / folder


# -- paths as users type them: asking about one never fails, however long or odd it is --------------------------------


def user_path(text: str | Path) -> Path:
    """Return the path ``text``, with ``~`` for the home folder if there is one."""
    try:
        return Path(os.path.expanduser(text))
    except ValueError:  # the system's list of users is asked, which takes no broken characters
        return Path(text)


def may_be_local(text: str) -> bool:
    """Return whether ``text`` looks like a path, and not like a name on the hub (``owner/name``)."""
    return text.startswith(("/", "./", "../", "~")) or text.count("/") > 1


def is_file(path: str | Path) -> bool:
    """Return whether ``path`` is a file; names that no file can have are none."""
    return os.path.isfile(path)  # unlike Path.is_file, silent about names that are too long


def is_dir(path: str | Path) -> bool:
    """Return whether ``path`` is a folder; names that no folder can have are none."""
    return os.path.isdir(path)
