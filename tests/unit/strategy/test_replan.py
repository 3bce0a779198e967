"""When the first iterations are compared with the plan, and how much time planning again may take."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lt_offload.plan import Settings, simulate
from lt_offload.plan.correct import timed
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.strategy import replan
from lt_offload.strategy.replan import Replanning
from tests.support.profiles.small import HUGE, small_profile

PROFILE = small_profile(3)
SLOW = replace(
    PROFILE,
    blocks=tuple(
        replace(b, options=tuple(replace(o, forward_s=2 * o.forward_s, backward_s=2 * o.backward_s) for o in b.options))
        for b in PROFILE.blocks
    ),
)
PLAN = replan.make_plan(PROFILE, Settings(memory=HUGE, planner="resident"))


@pytest.fixture(autouse=True)
def first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages ask which process this is; Lightning says so when it is imported."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


class FakeEngine:
    """Shows what a machine like ``true`` would."""

    def __init__(self, true: Profile = SLOW, *, replaceable: bool = True, runs: bool = True) -> None:
        self.plan, self.true = PLAN, true
        self.recorder = SimpleNamespace(iterations=0)
        self.handover = SimpleNamespace(may_be_replaced=lambda: replaceable, may_run=lambda plan: runs)

    def trace(self) -> Any:
        return simulate(timed(self.plan, self.true), self.true)


def due_after(replanning: Replanning, engine: Any, most: int = 20) -> int:
    """Return how many iterations it takes until there is something to compare."""
    for count in range(1, most):
        engine.recorder.iterations += 1
        if replanning.due(engine):
            return count
        assert not replanning.due(engine), "one iteration counts once"
    return most


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of the plans that were asked for; each is twice as fast as it should be."""
    found: list[Settings] = []

    def make(profile: Profile, settings: Settings) -> Plan:
        found.append(settings)
        plan = timed(PLAN, profile)
        return replace(plan, predicted=replace(plan.predicted, iteration_s=plan.predicted.iteration_s / 2))

    monkeypatch.setattr(replan, "make_plan", make)
    return found


def test_three_iterations_count_after_two_that_do_not(asked: list[Settings]) -> None:
    replanning, engine = Replanning(Settings(), PROFILE), FakeEngine()
    assert not replanning.due(engine), "none has been run"  # type: ignore[arg-type]
    assert due_after(replanning, engine) == 5
    found = replanning.correct(engine, 1e6, 7)  # type: ignore[arg-type]
    assert found is not None
    plan, takes_over = found
    assert takes_over
    assert replanning.profile.iterations == (5, 6, 7), "the training's, which has had others before this engine"
    assert asked == [Settings(memory=PLAN.budget_bytes, solver_time_limit=30.0)]
    another = FakeEngine()
    another.plan = timed(plan, replanning.profile)
    assert due_after(replanning, another) == 5, "another engine warms up again"
    assert replanning.correct(another, 1e6, 7) is None  # type: ignore[arg-type]
    assert replanning.over


@pytest.mark.parametrize(("steps", "limit"), [(float("inf"), 30.0), (1.0, 0.1 * 183), (0.05, None), (0.0, None)])
def test_planning_takes_a_part_of_the_time_that_is_left(
    steps: float, limit: float | None, asked: list[Settings]
) -> None:
    replanning, engine = Replanning(Settings(), PROFILE), FakeEngine()
    due_after(replanning, engine)
    found = replanning.correct(engine, steps, 7)  # type: ignore[arg-type]
    assert found is not None
    assert [settings.solver_time_limit for settings in asked] == ([] if limit is None else [pytest.approx(limit)])


def test_rows_that_are_shorter_than_planned_are_said_instead_of_a_lane(
    asked: list[Settings], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replanning, engine = Replanning(Settings(), replace(PROFILE, sequence_length=512)), FakeEngine(replaceable=False)
    for length in (40, 53):
        replanning.saw([{"input_ids": torch.zeros(2, length, dtype=torch.long)}])
    due_after(replanning, engine)
    found = replanning.correct(engine, 1e6, 7)  # type: ignore[arg-type]
    assert found is not None
    why = "rows are 53 tokens long at most, planned were 512; if none is longer, plan for 56 (--data.max_length 56)"
    assert why in caplog.text
    assert any(why in note for note in found[0].notes)
    assert "compute" not in caplog.text
