"""Runs beside each other: settings and figures that differ, and whether they are the same bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_offload.errors import ConfigError
from lt_offload.nested import shown
from lt_offload.report.page import NONE
from lt_offload.report.runs import METRICS, RunFolder, read_run
from lt_offload.schema.explain import samples_of
from lt_offload.schema.plan import Plan
from lt_offload.units import format_bytes, format_seconds

_OF_A_PLACE = "trainer.default_root_dir"
"""The setting that names the place of a run and does not change its results."""
_MOST = 12
"""Runs that can be compared at once."""

Rows = Mapping[str, Sequence[str]]
"""Values in each run, by what is compared."""


def read_runs(paths: Sequence[str]) -> dict[str, RunFolder]:
    """Return the runs in the folders ``paths``, by the folders' names, or by their paths where these are the same.

    Of a single one that was resumed: its parts, by their steps. Raises ``ConfigError`` if there are fewer than two, one
    is no run folder, has no metrics, or is given twice.
    """
    if len(paths) < 2:
        if paths and len(parts := parts_of(read_run(*paths))) > 1:
            return parts
        count = len(paths) or "none"
        raise ConfigError(
            f"compare needs two run folders or more, got {count}: lt-finetune compare RUN RUN; or one that was resumed"
        )
    if len(paths) > _MOST:
        raise ConfigError(f"compare: {len(paths)} runs are too many for one table; give {_MOST} at most")
    runs = [read_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not run.curves:
            why = f": {run.warnings[0]}" if run.warnings else ""
            raise ConfigError(
                f"{path!r} has no {METRICS} to compare{why}; the run did not begin to train, or logs elsewhere"
            )
    resolved = [run.path.resolve() for run in runs]
    for place, where in enumerate(resolved):
        if where in resolved[:place]:
            raise ConfigError(f"compare: {paths[place]!r} is given twice; name two different run folders")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(Path(path)) for path in paths]
    return dict(zip(names, runs, strict=True))


def parts_of(run: RunFolder) -> dict[str, RunFolder]:
    """Return the parts of ``run`` as runs of their own, by their steps; the plan is that of the last one."""
    return {
        f"steps {part.first_step + 1} to {part.last_step}": replace(
            run,
            curves={
                name: [(step, value) for step, value in curve if part.first_step < step <= part.last_step]
                for name, curve in run.curves.items()
            },
            parts=(part,),
            plan=run.plan if part is run.parts[-1] else None,
            warnings=run.warnings if part is run.parts[-1] else (),
        )
        for part in run.parts
    }


def tables(runs: Mapping[str, RunFolder]) -> dict[str, Rows]:
    """Return the figures of all runs, and what is not the same in their settings and plans, by the titles of tables."""
    beside = list(runs.values())
    settings = [
        # One that is null is none.
        {name: shown(value, 200) for name, value in run.settings.items() if value is not None and name != _OF_A_PLACE}
        for run in beside
    ]
    plans = [{} if run.plan is None else _decided(run.plan) for run in beside]
    return {
        "figures": _rows([described(run, beside) for run in beside]),
        "settings that differ": _differing(settings),
        "plans that differ": _differing(plans) if sum(map(bool, plans)) > 1 else {},
    }


def described(run: RunFolder, beside: Sequence[RunFolder] = ()) -> dict[str, str]:
    """Return losses, speed and memory of ``run``, by what they are called; losses also at the last step of all runs."""
    texts = {"ended": run.parts[-1].ended if run.parts else "did not say", "steps": str(run.steps)}
    for name, curve in run.losses.items():
        if not curve:
            continue
        at, best = min(curve, key=lambda point: point[1])
        texts[f"{name}, first"] = f"{curve[0][1]:.4f}"
        texts[f"{name}, best"] = f"{best:.4f} at {at}"
        texts[f"{name}, last"] = f"{curve[-1][1]:.4f}"
        common = set(dict(curve)).intersection(*(dict(other.losses[name]) for other in beside))
        if beside and common:
            texts[f"{name}, step {max(common)}"] = f"{dict(curve)[max(common)]:.4f}"
    plan = run.plan
    values: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("tokens/s", run.median("tokens_per_s"), "{:.4g}".format),
        ("tokens/s that are trained on", run.median("trained_tokens_per_s"), "{:.4g}".format),
        ("iteration, planned", plan and plan.predicted.iteration_s, format_seconds),
        ("iteration", run.median("step_s"), format_seconds),
        ("step, start to start", run.median("wall_step_s"), format_seconds),
        ("device budget", plan and plan.budget_bytes, format_bytes),
        ("device peak", run.largest("device_peak_bytes"), format_bytes),
        ("RAM budget", plan and plan.host_budget_bytes, format_bytes),
        ("RAM peak", run.largest("host_peak_bytes"), format_bytes),
        ("RAM of the process", run.largest("process_peak_bytes"), format_bytes),
        ("model FLOPs use", run.median("mfu"), "{:.1%}".format),
    )
    return texts | {name: tell(value) for name, value, tell in values if value is not None}


def _decided(plan: Plan) -> dict[str, str]:
    travels: Counter[str] = Counter()
    for op, count in zip(plan.ops, plan.counts, strict=True):
        travels[op.lane] += count * op.bytes

    def counted(names: Iterable[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())

    return {
        "planner": plan.planner,
        "batch": samples_of(plan),
        "micro-batches": str(plan.accumulate),
        "lower bound": format_seconds(plan.predicted.lower_bound_s),
        "to the device": format_bytes(travels["h2d"]),
        "to the host": format_bytes(travels["d2h"]),
        "activations": counted(plan.options),
        "updates": counted(place for place in plan.update_places if place != "none"),
        "model structure": plan.fingerprint,
    }


def _rows(texts: Sequence[Mapping[str, str]]) -> Rows:
    return {
        name: [one.get(name, NONE) for one in texts] for name in dict.fromkeys(name for one in texts for name in one)
    }


def _differing(texts: Sequence[Mapping[str, str]]) -> Rows:
    return {name: values for name, values in _rows(texts).items() if len(set(values)) > 1}


def trajectories(runs: Mapping[str, RunFolder]) -> list[str]:
    """Return, of each run but the first, whether its training losses are those of the first one, bit for bit."""
    (first_name, first_run), *others = runs.items()
    first = dict(first_run.curve("train_loss"))
    said = []
    for name, run in others:
        other = dict(run.curve("train_loss"))
        steps = sorted(first.keys() & other.keys())
        # Numbers that are not numbers are the same if both are; nothing else equals them.
        differing = [s for s in steps if first[s] != other[s] and not (first[s] != first[s] and other[s] != other[s])]
        of = f"{name} and {first_name}"
        if not steps:
            said.append(f"{of} have no step in common.")
        elif not differing:
            all_of = "" if first.keys() == other.keys() else " in common"
            said.append(
                f"Identical trajectories: {of} have equal losses in all {len(steps)} steps{all_of}, bit for bit."
            )
        else:
            at = differing[0]
            said.append(f"Different trajectories: {of} differ from step {at} on ({first[at]!r} and {other[at]!r}).")
    return said
