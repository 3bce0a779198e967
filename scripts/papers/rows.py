"""What a reproduced table is: rows of published and computed figures, and what they were computed from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of a paper beside ours."""

    label: str
    published: float | None
    """None: the paper shows it only in a plot, or not at all."""
    ours: float | None
    """Simulated; None: there is no such plan."""
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over published."""
        return self.ours / self.published if self.ours is not None and self.published else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table or figure of a paper."""

    key: str
    """Short and unique, e.g. ``"offmate-table-2-top"``."""
    title: str
    source: str
    """Paper, year, table or figure."""
    rows: tuple[Row, ...]
    inputs: tuple[str, ...] = ()
    """What the rows were computed from, as the paper gives it."""
    assumed: tuple[str, ...] = ()
    """What the paper does not say, with the value used."""
    missing: tuple[str, ...] = ()
    """What cannot be reproduced, with the reason."""
