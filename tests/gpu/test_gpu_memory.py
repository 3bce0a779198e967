"""Training within three budgets, each in a process of its own: peaks as the driver shows them, times, and overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lt_offload
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.gpu.machine import between
from tests.gpu.target import Target, used_by_all
from tests.gpu.worker import WARM_UP, call

SHARES = {"smallest": 0.0, "tight": 0.3, "half": 0.6}
"""Of the way from the smallest budget to the one in which everything stays."""

pytestmark = [pytest.mark.only("cuda", "cpu"), pytest.mark.no_cover]

Found = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Run:
    plan: Plan
    seen: dict[str, Any]

    @property
    def helps(self) -> bool:
        """Whether more memory would make it faster."""
        return self.plan.predicted.iteration_s > 1.02 * self.plan.predicted.no_offload_s


@pytest.fixture(scope="module")
def profile(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    print(call("profile", kind=target.kind, size=size(target), file=str(file)))
    return Profile.load(file)


@pytest.fixture(scope="module", params=SHARES)
def run(request: pytest.FixtureRequest, target: Target, profile: Profile, tmp_path_factory: Any) -> Run:
    plan = lt_offload.solve(profile, memory=between(profile, SHARES[request.param]))
    file: Path = plan.save(tmp_path_factory.mktemp("plan") / "plan.json")
    before = used_by_all() if target.cuda else 0
    steps = 10 if target.real else 2
    return Run(
        plan=plan, seen=call("train", kind=target.kind, size=size(target), plan=str(file), steps=steps, before=before)
    )


def size(target: Target) -> str:
    return {"cuda": "large", "fake": "small"}.get(target.kind, "tiny")


def test_the_peak_is_within_the_budget(run: Run, found: Found) -> None:
    budget, predicted = run.plan.budget_bytes, run.plan.predicted.device_peak_bytes
    keys = ("peak", "peak_source", "engine_peak", "stages")
    found(budget=budget, predicted=predicted, helps=run.helps, **{key: run.seen[key] for key in keys})
    assert run.seen["peak"] <= budget


@pytest.mark.only("cuda", "cpu", fake=False)  # there the allocator's granularity fills small budgets
def test_the_budget_is_used(run: Run, target: Target) -> None:
    """At least 95 % of it where more memory helps; a small model has few sizes to choose from, and times that vary.

    But for a part of what is planned for the context: the process that measured has loaded kernels that this one lacks.
    """
    budget, predicted, peak = run.plan.budget_bytes, run.plan.predicted.device_peak_bytes, run.seen["peak"]
    spared = 0
    if target.real:
        last = run.seen["stages"]["last iteration"]
        spared = run.plan.context_bytes - (last["driver"] - last["reserved"])
        assert 0 <= spared < 300 << 20
    assert peak >= (0.95 if target.real else 0.85) * ((budget if run.helps and target.real else predicted) - spared)


@pytest.mark.only("cuda", fake=False)  # a small model has less room than what torch's allocator takes at a time
def test_the_allocator_does_not_run_short(run: Run, found: Found) -> None:
    """In the steady state: every retry makes the launching thread wait for the device."""
    found(allocator=run.seen["allocator"])
    warm, *_, last = run.seen["allocator"][WARM_UP - 1 :]
    assert last == warm


@pytest.mark.only("cuda", "cpu", fake=False)  # when something ran means nothing there
def test_everything_planned_is_recorded(run: Run, target: Target, found: Found) -> None:
    planned = [op.id for op in run.plan.ops if op.lane == "compute" and op.kind in ("forward", "backward")]
    found(both_ways_s=run.seen["both_ways_s"], busy_s=run.seen["busy_s"], recorded_s=run.seen["recorded_s"])
    # The host is ahead of a GPU: its last op of an iteration may run in the next one's time.
    assert set(planned).difference(run.seen["ops"]) <= ({planned[-1]} if target.real else set())
    for lane in ("h2d", "d2h", "host"):
        assert (run.seen["busy_s"][lane] > 0) == any(op.lane == lane for op in run.plan.ops)
    if target.real and min(run.seen["busy_s"][lane] for lane in ("h2d", "d2h")) > 0:
        assert run.seen["both_ways_s"] > 0, "copies to and from the device wait for each other"


def test_the_time_is_what_was_predicted(run: Run, target: Target, found: Found) -> None:
    """The goal is 5 %; here only that the prediction is no nonsense. The emulated device says nothing about time."""
    ratio = run.seen["iteration_s"] / run.plan.predicted.iteration_s
    found(ratio=ratio, measured_s=run.seen["iteration_s"], predicted_s=run.plan.predicted.iteration_s)
    if target.real:
        assert 0.5 < ratio < 2
    else:
        assert run.seen["iteration_s"] > 0
