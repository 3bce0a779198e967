"""What the end of a run asks the planner: only where the answer takes a small part of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lt_offload.finetune.summary import RunSummary, run_gains, write_run_report

from lt_offload.plan import Settings, make_plan, solve
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.samples import MB, make_profile

PROFILE = make_profile(layers=4, tensors_per_layer=2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROFILE, memory=400 * MB, time_limit=5)


def trainer(plan: Plan | None) -> Any:
    strategy = SimpleNamespace(plan=plan, profile=PROFILE, trace=None, settings=Settings(recompute=False))
    return SimpleNamespace(strategy=strategy, global_step=7)


def after(seconds: float) -> RunSummary:
    summary = RunSummary()
    summary.step_times = [seconds / 100] * 100
    return summary


def test_a_long_run_tells_what_more_would_have_bought(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Settings] = []

    def remember(profile: Profile, settings: Settings) -> Plan:
        asked.append(settings)
        return make_plan(profile, settings)

    monkeypatch.setattr("lt_offload.plan.make_plan", remember)
    found = run_gains(after(100.0), trainer(plan))
    assert [gain.change.partition(" ")[0] for gain in found] == ["1", "8", "a", "host"]
    assert {settings.time_limit for settings in asked} == {2.5}
    assert not any(settings.recompute for settings in asked)
    page = write_run_report(after(100.0), trainer(plan), tmp_path, found)
    assert page is not None
    assert "What more would buy" in page.read_text()


def test_a_long_run_is_asked_for_seconds_and_not_for_minutes(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def remember(profile: Profile, settings: Settings) -> Plan:
        limits.append(settings.time_limit)
        return plan

    monkeypatch.setattr("lt_offload.plan.make_plan", remember)
    run_gains(after(1e6), trainer(plan))
    assert set(limits) == {10.0}


def test_a_short_run_is_not_delayed(plan: Plan) -> None:
    assert run_gains(after(60.0), trainer(plan)) == ()
    assert run_gains(after(1000.0), trainer(None)) == ()
    assert run_gains(after(1000.0), SimpleNamespace(strategy=SimpleNamespace())) == ()
