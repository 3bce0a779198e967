"""Plans from files agree with themselves, so that whoever shows or compares them need not ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lt_offload.errors import PlanError
from lt_offload.plan import check, solve
from lt_offload.schema.files import to_json
from lt_offload.schema.plan import Plan, problems
from tests.support.profiles.by_hand import built
from tests.support.profiles.small import resident, small_profile

PROFILE = small_profile(5)
PLAN = solve(PROFILE, memory=16_000, planner="l2l")


def written(tmp_path: Path, change: Any) -> Path:
    whole = json.loads(to_json(PLAN))
    change(whole)
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    return tmp_path / "plan.json"


def put(*path: Any) -> Any:
    *parents, last, value = path

    def change(whole: Any) -> None:
        for part in parents:
            whole = whole[part]
        whole[last] = value

    return change


def first(kind: str) -> int:
    return next(op.id for op in PLAN.ops if op.kind == kind)


def test_a_sound_plan_has_no_problems(tmp_path: Path) -> None:
    assert list(problems(PLAN)) == []
    assert Plan.load(written(tmp_path, lambda _: None)) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("batch_size", 0), "batch_size is 0"),
        (put("budget_bytes", -1), "a size or time is negative"),
        (put("budget_bytes", 10**30), "budget_bytes: .* is out of bounds"),
        (put("predicted", "iteration_s", float("nan")), "predicted.iteration_s: nan is out of bounds"),
        (put("options", []), "it has no blocks"),
        (put("timeline", 0, "block", 9), r"timeline\.0: the forward of block 9, there are 5 blocks"),
        (put("groups", 0, "sizes", []), r"groups\.0: 0 sizes for 1 tensors"),
        (put("groups", 0, "tensors", [99]), r"groups\.0: it has tensors that do not exist"),
        (put("initial", [{"group": 99, "offset": 0}]), r"initial\.0: group 99 at"),
        (put("ops", 3, "id", 77), r"op 77 .*: ids: it stands at position 3"),
        (put("ops", 3, "step", 77), r"op 3 .*: step 77 of block"),
        (put("ops", 3, "block", -1), r"op 3 .*: step .* of block -1"),
        (put("ops", 3, "after", [999]), r"op 3 .*: after: it waits for ops that do not exist"),
        (put("ops", first("prefetch"), "groups", [99]), "groups: it names some that do not exist"),
        (put("ops", first("prefetch"), "offsets", []), "offsets: 0 for 1 groups"),
        (put("ops", first("prefetch"), "seconds", -1), "seconds: -1.0 is no time"),
        (lambda whole: whole["ops"].pop(first("prefetch")), "ids: it stands at position"),
        (put("ops", first("prefetch"), "payload", "state"), "groups: it names some of another payload than state"),
        (put("colour", "red"), "colour: "),
    ],
)
def test_a_plan_that_contradicts_itself(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"plan.json' is not a valid Plan file: .*{message}"):
        Plan.load(written(tmp_path, change))


def test_a_gradient_that_no_backward_makes_is_a_violation_and_no_crash() -> None:
    from dataclasses import replace

    frozen = tuple(replace(block, has_backward=False) for block in PROFILE.blocks)
    plan = built(resident(PROFILE), PROFILE)
    assert any("complete in step None" in problem for problem in check(plan, replace(PROFILE, blocks=frozen)))


def test_a_copy_to_the_host_of_what_is_not_there_is_a_violation_and_no_crash(tmp_path: Path) -> None:
    plan = Plan.load(written(tmp_path, put("ops", first("prefetch"), "groups", [1])))
    assert any("is not on the device" in problem for problem in check(plan, PROFILE))
