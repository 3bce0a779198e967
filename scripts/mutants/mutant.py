"""A fault of the package: where it is put in, and the tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: the file below the repository, what is there and what is written, and tests below tests/."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...] = ()

    def put_in(self, folder: Path) -> None:
        """Make the fault in a copy of the tree."""
        file = folder / self.file
        text = file.read_text(encoding="utf-8")
        for was, becomes in self.changes:
            assert text.count(was) == 1, f"{self.name}: {self.file} has {was!r} {text.count(was)} times"
            text = text.replace(was, becomes)
        file.write_text(text, encoding="utf-8")


def mutant(name: str, file: str, was: str, becomes: str, *tests: str) -> Mutant:
    """Return a fault of one place; ``file`` is below the package, ``tests`` are below tests/."""
    return Mutant(name, f"lt_offload/{file}", ((was, becomes),), tests)
