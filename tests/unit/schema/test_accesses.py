"""What ops do with memory follows from their kind, their payload and the memories of their lane."""

from __future__ import annotations

from typing import Any

from lt_offload.schema.accesses import PAYLOADS, accesses, lanes_of
from lt_offload.schema.lanes import LANES
from lt_offload.schema.plan import Op


def op(kind: Any, lane: Any, payload: Any = None) -> Op:
    return Op(id=0, kind=kind, step=0, block=0, lane=lane, payload=payload)


def test_what_is_said_of_lanes_is_enough_for_all_kinds() -> None:
    for lane in LANES:
        for kind in lane.kinds:
            payloads = [payload for payload in PAYLOADS.get(kind, (None,)) if lane.name in lanes_of(kind, payload)]
            assert payloads, f"{kind} on {lane.name}"
            assert all(accesses(op(kind, lane.name, payload)) for payload in payloads)
    assert lanes_of("drop", "weight") == ["none"]
    assert lanes_of("offload", "activation") == ["d2h"], "a computation writes gradients itself, and nothing else"
