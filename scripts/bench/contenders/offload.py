"""lt_offload: measure, plan, and train by the plan in a plain loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lt_offload
from lt_offload import Plan, Profile
from scripts.bench.contenders.case import Case, Training
from scripts.planning import busy, describe


@contextmanager
def training(case: Case) -> Iterator[Training]:
    """Train within the budget; processes with the same model share the profile."""
    case.limit()
    path = case.folder / "profile.json"
    batch = case.batches()[0]
    times: dict[str, float] = {}
    plan = None
    if path.exists():  # then whether there is a plan at all is known before the model is built
        profile = Profile.load(path)
        plan = _plan(case, profile, times)
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    if plan is None:
        case.say("measuring")
        began = time.perf_counter()
        parts = case.workload.parts
        profile = lt_offload.profile(model, batch, optimizer=optimizer, device=case.place, micro_batches=parts)
        times["measure_s"] = time.perf_counter() - began
        profile.save(path)
        plan = _plan(case, profile, times)
    case.say("taking the model over")
    with lt_offload.offloaded(
        model, optimizer, batch, plan=plan, accelerator=case.device, micro_batches="auto"
    ) as engine:

        def figures() -> dict[str, Any]:
            trace = engine.trace()
            plan.save(case.folder / "plan.json")
            trace.save(case.folder / "trace.json")
            return {
                "plan": _figures(plan, profile) | times,
                "busy_s": busy(trace),
                "predicted_busy_s": busy(lt_offload.simulate(plan, profile)),
                "engine_peak_bytes": engine.stats.device_peak_bytes,
                "engine_host_bytes": engine.stats.host_peak_bytes,
            }

        yield Training(step=case.step(model, optimizer), figures=figures, own_limit=True)


def _plan(case: Case, profile: Profile, times: dict[str, float]) -> Plan:
    case.say("planning")
    began = time.perf_counter()
    ram = case.host_bytes if case.host_given else min(case.host_bytes, profile.hardware.host_bytes)
    plan = lt_offload.solve(profile, memory=case.budget_bytes, host_memory=ram)
    times["plan_s"] = time.perf_counter() - began
    return plan


def _figures(plan: Plan, profile: Profile) -> dict[str, Any]:
    predicted = plan.predicted
    return describe(plan, profile) | {
        "lower_bound_s": predicted.lower_bound_s,
        "no_offload_s": predicted.no_offload_s,
        "options": {name: plan.options.count(name) for name in dict.fromkeys(plan.options)},
        "update_places": {name: plan.update_places.count(name) for name in dict.fromkeys(plan.update_places)},
        "hardware": asdict(profile.hardware),
        "optimizer": asdict(profile.optimizer),
        "notes": list(plan.notes),
    }
