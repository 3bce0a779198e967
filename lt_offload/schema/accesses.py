"""Accesses of each kind of op to memory, told here and nowhere else.

An op works in one memory, that of its lane (``Lane.source``), and copies go from there to another (``Lane.target``).
What it takes, reads, writes and gives back there follows from its kind. Checks of the order of ops, counts of bytes
and the engine's list of host copies that change all ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from lt_offload.schema.lanes import LANE, LANES, LaneName, OpKind, TierName

if TYPE_CHECKING:
    from lt_offload.schema.plan import Op, Payload

How = Literal["reads", "writes", "uses up"]
"""``uses up``: written, with contents afterwards that no later op may read."""

IN_ARENA: tuple[Payload, ...] = ("weight", "state", "sum")
"""Payloads whose device copies lie in the arena; the framework allocates the others."""

PAYLOADS: Mapping[OpKind, tuple[Payload, ...]] = {
    "prefetch": (*IN_ARENA, "activation"),
    "offload": (*IN_ARENA, "grad", "activation"),
    "drop": IN_ARENA,
}
"""The payloads that ops of each kind may move, if they move something."""

_IN_PLACE: Mapping[OpKind, tuple[tuple[Payload, How], ...]] = {
    "forward": (("weight", "reads"), ("activation", "writes")),
    "backward": (("weight", "reads"), ("grad", "writes"), ("activation", "reads")),
    "accumulate": (("grad", "reads"), ("sum", "writes")),
    "reduce": (("sum", "writes"),),
    "update": (("grad", "reads"), ("weight", "writes"), ("state", "writes"), ("sum", "uses up")),
}
"""The accesses of the other kinds, all in the memory of their lane."""


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """One access of an op to the weights, states, ... that it names, or that its block has."""

    tier: TierName
    payload: Payload
    how: How


def accesses(op: Op) -> tuple[MemoryAccess, ...]:
    """Return the accesses of ``op``, in this order.

    Three things depend on the plan: sums are there if it adds gradients up, an update that waits for all gradients
    reads none but their sums, and weights that a computation reads directly (``Op.zero_copy``) are on the host.
    """
    return _accesses(op.kind, op.lane, op.payload)


@cache
def _accesses(kind: OpKind, lane: LaneName, payload: Payload | None) -> tuple[MemoryAccess, ...]:
    # It touches no content; who may reuse the range is a matter of its `after`.
    if kind == "drop":
        return ()
    # From the lane, not from the kind: an update on the host's lane reads and writes the same things in host memory.
    source, target = LANE[lane].source, LANE[lane].target
    if payload is None:
        return tuple(MemoryAccess(source, one, how) for one, how in _IN_PLACE.get(kind, ()))
    assert target is not None, lane
    return MemoryAccess(source, payload, "reads"), MemoryAccess(target, payload, "writes")


def writes(op: Op, tier: TierName) -> tuple[Payload, ...]:
    """Return the payloads that ``op`` changes in the memory ``tier``."""
    return tuple(access.payload for access in accesses(op) if access.tier == tier and access.how != "reads")


def takes_room(op: Op) -> bool:
    """Return whether ``op`` takes a range of the arena for what it brings."""
    return op.kind == "prefetch" and op.payload in IN_ARENA


def lanes_of(kind: OpKind, payload: Payload | None) -> list[LaneName]:
    """Return the lanes on which such ops may run; ``none`` for those that occupy none."""
    lanes = [lane.name for lane in LANES if kind in lane.kinds]
    if payload != "grad" and kind == "offload":
        # The backward itself writes gradients to host memory, and nothing else.
        lanes = [name for name in lanes if name != "compute"]
    return lanes or ["none"]
