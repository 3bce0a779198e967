"""Plan files of schema 2 are read: ``clipped_of_schema_2.json`` was written by the release before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import PlanError
from lt_offload.plan import Plan, check, solve
from tests.support.profiles.small import small_profile

CLIPPED = Path(__file__).with_name("clipped_of_schema_2.json")
"""Two micro-batches, and updates that wait for the norm, of three blocks."""


def test_a_window_with_clipping_names_the_ops_of_every_pass(tmp_path: Path) -> None:
    plan = Plan.load(CLIPPED)
    assert check(plan, small_profile()) == []
    said = json.loads(Path(plan.save(tmp_path / "plan.json")).read_text())
    assert list(said["programs"]) == ["accumulating", "settling"]
    labels = [plan.ops[number].label for number in said["programs"]["settling"]]
    assert labels == ["update 2", "update 1", "drop weight 1", "prefetch weight 1", "update 0"]
    adding = {plan.ops[number].kind for number in said["programs"]["accumulating"]}
    assert {"forward", "backward", "accumulate"} <= adding
    assert "update" not in adding
    assert {*said["programs"]["accumulating"], *said["programs"]["settling"]} == {op.id for op in plan.ops}
    assert Plan.load(tmp_path / "plan.json") == plan


def test_it_says_what_is_planned_today() -> None:
    """But for what has been added since: the first pass begins sums, and all gradients are there before any update."""
    then, now = Plan.load(CLIPPED), solve(small_profile(), memory=8_000, accumulate=2, delayed=True)
    assert [*now.programs] == ["beginning", *then.programs]
    for which, numbers in then.programs.items():
        assert [op.label for op in now.program(which)] == [then.ops[number].label for number in numbers]
    assert (then.options, then.update_places) == (now.options, now.update_places)
    assert [copy.group for copy in then.initial] == [copy.group for copy in now.initial]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ops": None}, "schema 2: TypeError"),
        ({"ops": [{}]}, "schema 2: KeyError: 'only'"),
        ({"timeline": [[]]}, "schema 2: AttributeError"),
        ({"programs": "none", "planner": 3}, "planner"),
        ({"schema": True}, "has schema True, .* reads schema 3"),
    ],
)
def test_what_is_no_plan_of_schema_2(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(CLIPPED.read_text()) | change))
    with pytest.raises(PlanError, match=words):
        Plan.load(path)
