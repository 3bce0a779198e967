"""A task that changes host memory: whoever takes part adds what is to be done, and it is queued once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lt_offload.execute.device.base import Cell, Device, Event
from lt_offload.execute.device.lanes import Lane
from lt_offload.execute.memory.live_group import LiveGroup, complete_on_host, distinct


@dataclass(eq=False, slots=True, kw_only=True)
class HostTask:
    """One task of a lane that works in host memory."""

    op: int
    """The plan's op that it carries out, or a part of it."""
    label: str
    lane: Lane = "host"
    urgency: int = 0
    nbytes: int = 0
    work: list[Callable[[], object]] = field(default_factory=list)
    """Is done in this order."""
    after: list[Event | None] = field(default_factory=list)
    """It begins when these are over, and the last changes of ``groups``."""
    groups: list[LiveGroup] = field(default_factory=list)
    """Their host copies change."""
    reads: list[Cell] = field(default_factory=list)
    writes: list[Cell] = field(default_factory=list)
    """Other memory that changes."""
    queued: list[Callable[[Event], object]] = field(default_factory=list)
    """Are told its event."""

    def queue(self, device: Device) -> Event:
        """Give it to ``device``; return its event."""
        groups = list(dict.fromkeys(self.groups))
        event = device.submit(
            self.lane,
            partial(one_by_one, tuple(self.work)),
            after=distinct([*self.after, *complete_on_host(groups)]),
            reads=list(dict.fromkeys(self.reads)),
            writes=[*[group.host_cell for group in groups], *dict.fromkeys(self.writes)],
            label=self.label,
            op=self.op,
            nbytes=self.nbytes,
            urgency=self.urgency,
        )
        for group in groups:
            group.updated_on_host_by(event)
        for tell in self.queued:
            tell(event)
        return event


def one_by_one(work: Sequence[Callable[[], object]]) -> None:
    """Do the parts of some work."""
    for part in work:
        part()
