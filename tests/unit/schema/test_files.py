"""Files of a form that is checked when they are read; lanes are rows that checks and simulations go through."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ConfigDict

from lt_offload.errors import PlanError
from lt_offload.schema.accesses import PAYLOADS, accesses, lanes_of
from lt_offload.schema.files import from_json, load_json, save_json, to_json
from lt_offload.schema.lanes import LANES
from lt_offload.schema.plan import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    spokes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cart:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    wheels: tuple[Wheel, ...]
    load: float | None = None
    schema: int = 3


CART = Cart(wheels=(Wheel(spokes=8, tags=("oak", "ä")), Wheel(spokes=12)), load=0.1)


def test_round_trip(tmp_path: Path) -> None:
    path = save_json(CART, tmp_path / "deep" / "cart.json")
    assert load_json(Cart, path, schema=3) == CART
    assert from_json(Cart, to_json(CART), source="cart", schema=3) == CART


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(CART)) | changes)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "cart.json is not a valid Cart file"),
        ("[]", "cart.json has schema None, this release of lt_offload reads schema 3 of Cart"),
        (changed(schema=2), "cart.json has schema 2, .* reads schema 3"),
        (changed(colour="red"), "cart.json is not a valid Cart file: colour"),
        (changed(wheels=[{"spokes": "many"}]), r"cart.json is not a valid Cart file: wheels\.0\.spokes"),
        (changed(wheels=[{}]), r"wheels\.0\.spokes: Field required"),
        ('{"schema": 3}', "cart.json is not a valid Cart file: wheels"),
    ],
)
def test_bad_files_are_named_with_the_path_of_the_error(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        from_json(Cart, text, source="cart.json", schema=3)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read Cart file .*nowhere.json.*No such file"):
        load_json(Cart, tmp_path / "nowhere.json", schema=3)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "cart.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not a valid Cart file"):
        load_json(Cart, tmp_path / "cart.json", schema=3)


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
