"""Files that come with the package: recipes and configs; in a wheel inside the package, in a source tree beside it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_root() -> Path:
    """Return the folder that holds ``recipes`` and ``configs``."""
    return _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent


def shipped_files(folder: str, suffix: str) -> dict[str, Path]:
    """Return the files of ``folder``, e.g. ``configs/hardware``, by name without ``suffix``, in alphabetical order."""
    return {path.name.removesuffix(suffix): path for path in sorted((shipped_root() / folder).glob(f"*{suffix}"))}
