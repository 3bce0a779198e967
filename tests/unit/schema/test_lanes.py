"""A lane is a row: whoever checks, simulates or counts goes through the lanes that are listed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from lt_offload.schema.accesses import PAYLOADS, accesses, lanes_of
from lt_offload.schema.lanes import LANES
from lt_offload.schema.plan import Op

PROGRAM = """
import lt_offload.schema.lanes as lanes

lanes.LANES = (*lanes.LANES, lanes.Lane(name="more", title="sums", kinds=("accumulate",), source="device"))
lanes.LANE = {lane.name: lane for lane in lanes.LANES}

from dataclasses import replace
from lt_offload.plan import check, simulate, solve
from tests.support.profiles.small import small_profile

profile = small_profile()
plan = solve(profile, memory=60_000, accumulate=2, host_update=False)
moved = next(op for op in plan.ops if op.kind == "accumulate")
ops = [replace(op, lane="more") if op is moved else op for op in plan.ops]
alone = replace(plan, ops=tuple(ops))
found = check(alone, profile)
assert all(f"not ordered after op {moved.id} (accumulate" in text for text in found), found
assert {text.split(",")[0].split("(")[1] for text in found} == {"backward 2", "update 2"}, found
ops = [replace(op, after=tuple(sorted({*op.after, moved.id}))) if op.id in (3, 5) else op for op in ops]
ordered = replace(plan, ops=tuple(ops))
assert check(ordered, profile) == []
assert abs(simulate(ordered, profile).busy("more") - moved.seconds) < 1e-9
"""
"""It moves the sums of a tensor to a lane that the computations do not wait for, unless the plan says so."""


def test_a_lane_more_is_checked_and_simulated() -> None:
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


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
