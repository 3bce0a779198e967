"""Lanes: what the ops of a plan occupy, one table for planning, execution and reports.

A new tier of memory, or a network, is one row here and one lane of the device (``execute/device``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["forward", "backward", "prefetch", "offload", "drop", "update", "accumulate"]
LaneName = Literal["compute", "h2d", "d2h", "host", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What ops occupy one after the other."""

    name: LaneName
    title: str
    """What people call it."""
    kinds: tuple[OpKind, ...]
    """Ops that may run on it."""


LANES: tuple[Lane, ...] = (
    Lane(name="compute", title="compute", kinds=("forward", "backward", "update", "accumulate", "offload")),
    Lane(name="h2d", title="copies to device", kinds=("prefetch",)),
    Lane(name="d2h", title="copies to host", kinds=("offload",)),
    Lane(name="host", title="updates on host", kinds=("update", "accumulate")),
)
"""All lanes, in the order in which they are drawn. A ``drop`` occupies none."""
