"""The lanes that the ops of a plan occupy: one table for planning, execution and reports.

A new tier of memory is a name here, a drive a lane per direction, and a lane of the device
(``execute/device``). What ops do with memory follows from their lane: see ``accesses.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

OpKind = Literal["forward", "backward", "prefetch", "offload", "drop", "update", "accumulate", "reduce"]
LaneName = Literal["compute", "h2d", "d2h", "host", "network", "none"]
TierName = Literal["device", "host"]
"""The memories, the fastest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A resource that ops occupy one after the other."""

    name: LaneName
    title: str
    """Its name for people."""
    kinds: tuple[OpKind, ...]
    """Ops that may run on it."""
    source: TierName
    """The memory that it works in, or copies from."""
    target: TierName | None = None
    """The memory that its copies go to."""
    in_order: bool = True
    """True: ops run in the order of issue. False: of those that can begin, the most urgent one is next."""
    between_machines: bool = False
    """True: idle where one machine trains alone; pictures and tables leave it out then."""


LANES: tuple[Lane, ...] = (
    Lane(
        name="compute",
        title="compute",
        # A backward may write gradients to host memory itself, which is an offload without a copy.
        kinds=("forward", "backward", "update", "accumulate", "offload"),
        source="device",
        target="host",
    ),
    Lane(name="h2d", title="copies to device", kinds=("prefetch",), source="host", target="device"),
    Lane(name="d2h", title="copies to host", kinds=("offload",), source="device", target="host"),
    # Gradients come with the last block first, and the next forward needs the first block first: in order it would
    # wait.
    Lane(name="host", title="updates on host", kinds=("update", "accumulate"), source="host", in_order=False),
    # In order on every machine, or two would wait for each other.
    Lane(name="network", title="sums between machines", kinds=("reduce",), source="host", between_machines=True),
)
"""All lanes, in the order in which they are drawn. A ``drop`` occupies none."""

LANE: Mapping[LaneName, Lane] = {lane.name: lane for lane in LANES}
"""The same by name."""

MACHINE_LANES = tuple(lane for lane in LANES if not lane.between_machines)
"""The lanes of one machine, which share its links and its memory; the first ones of ``LANES``."""


def shown(used: Iterable[str]) -> tuple[Lane, ...]:
    """Return the lanes that pictures and tables show: all of a machine, and others that are ``used``."""
    names = set(used)
    return tuple(lane for lane in LANES if not lane.between_machines or lane.name in names)
