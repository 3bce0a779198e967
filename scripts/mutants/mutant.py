"""What a fault of the package is: where it is put in, and which tests should notice it."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.gpu import mutants as cuda


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault in a file of the package, and the tests that should notice it, below tests/."""

    name: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]

    @property
    def fault(self) -> cuda.Mutant:
        """What is written, and where."""
        return cuda.Mutant(self.name, f"lt_offload/{self.file}", ((self.was, self.becomes),))


def mutant(name: str, file: str, was: str, becomes: str, *tests: str) -> Mutant:
    """Return it; ``tests`` are below tests/."""
    return Mutant(name, file, was, becomes, tests)
