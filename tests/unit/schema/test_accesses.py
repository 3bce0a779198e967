"""What ops do with memory follows from their kind, their payload and the memories of their lane."""

from __future__ import annotations

from typing import Any

import pytest

from lt_offload.schema.accesses import PAYLOADS, accesses, lanes_of, takes_room, writes
from lt_offload.schema.lanes import LANES
from lt_offload.schema.plan import Op


def op(kind: Any, lane: Any, payload: Any = None) -> Op:
    return Op(id=0, kind=kind, step=0, block=0, lane=lane, payload=payload)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (op("forward", "compute"), "reads device weight, writes device activation"),
        (op("backward", "compute"), "reads device weight, writes device grad, reads device activation"),
        (op("prefetch", "h2d", "state"), "reads host state, writes device state"),
        (op("offload", "d2h", "weight"), "reads device weight, writes host weight"),
        (op("offload", "compute", "grad"), "reads device grad, writes host grad"),
        (op("drop", "none", "weight"), ""),
        (
            op("update", "compute"),
            "reads device grad, writes device weight, writes device state, uses up device sum",
        ),
        (op("update", "host"), "reads host grad, writes host weight, writes host state, uses up host sum"),
        (op("accumulate", "host"), "reads host grad, writes host sum"),
    ],
)
def test_every_kind_of_op(made: Op, expected: str) -> None:
    assert ", ".join(f"{access.how} {access.tier} {access.payload}" for access in accesses(made)) == expected


def test_what_is_said_of_lanes_is_enough_for_all_kinds() -> None:
    for lane in LANES:
        for kind in lane.kinds:
            payloads = [payload for payload in PAYLOADS.get(kind, (None,)) if lane.name in lanes_of(kind, payload)]
            assert payloads, f"{kind} on {lane.name}"
            assert all(accesses(op(kind, lane.name, payload)) for payload in payloads)
    assert lanes_of("drop", "weight") == ["none"]
    assert lanes_of("offload", "activation") == ["d2h"], "a computation writes gradients itself, and nothing else"


def test_room_is_taken_in_the_arena_and_changed_host_copies_are_named() -> None:
    assert [takes_room(op("prefetch", "h2d", payload)) for payload in PAYLOADS["prefetch"]] == [True, True, True, False]
    assert writes(op("update", "host"), "host") == ("weight", "state", "sum")
    assert writes(op("offload", "d2h", "state"), "host") == ("state",)
    assert writes(op("update", "compute"), "host") == ()
