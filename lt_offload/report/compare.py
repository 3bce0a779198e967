"""Runs beside each other: settings that differ, curves over each other, and whether they are the same bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeVar

from lt_offload.errors import ConfigError
from lt_offload.report import plan_page
from lt_offload.report.drawing import COLORS, Line, lines, page, unbroken
from lt_offload.report.run_page import loss_figure, memory_figure, plainly, validation
from lt_offload.report.runs import METRICS, Curve, RunFolder, read_run
from lt_offload.report.tables import NONE, pairs, section, table
from lt_offload.schema.explain import samples_of
from lt_offload.schema.plan import Plan
from lt_offload.units import format_bytes, format_seconds

_OF_A_PLACE = ("trainer.default_root_dir",)
"""Settings that say where a run is, not what it is."""
MOST_SETTINGS = 25
"""Differing settings that are shown."""

_MOST = 12
"""Runs that can be compared at once."""
_SHORT = 20
"""Characters of a name that fits everywhere."""

T = TypeVar("T")
Row = tuple[str, tuple[str, ...]]
"""What is compared, and its value in each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs or more, read."""

    names: tuple[str, ...]
    """Short, unique names: those of the folders, or their paths where these are the same."""
    runs: tuple[RunFolder, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names, or letters in their place where these are too long for the head of a table or a legend."""
        if len(self.names) <= 3 and max(map(len, self.names)) <= _SHORT:
            return self.names
        return tuple(chr(ord("A") + place) for place in range(len(self.names)))

    @property
    def common(self) -> int | None:
        """The last step of which every run has a training loss; None if there is none."""
        steps = [{step for step, _ in run.curve("train_loss")} for run in self.runs]
        return max(set.intersection(*steps), default=None)


def read_runs(paths: Sequence[str]) -> RunComparison:
    """Return the runs in the folders ``paths``.

    Raises:
        ConfigError: if there are fewer than two, one is no run folder, has no metrics, or is given twice.
    """
    if len(paths) < 2:
        given = f"got {len(paths) or 'none'}"
        raise ConfigError(f"compare needs two run folders or more, {given}: lt-finetune compare RUN RUN")
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
    unique = len(set(names)) == len(names)
    return RunComparison(names=tuple(names if unique else [str(Path(path)) for path in paths]), runs=tuple(runs))


# -- what is compared ------------------------------------------------------------------------------------------------


def figures(found: RunComparison) -> list[Row]:
    """Return losses, speed, memory and plans of all runs."""
    common = found.common
    rows: list[tuple[str, Callable[[RunFolder], str | None]]] = [
        ("ended", lambda run: run.parts[-1].ended if run.parts else "did not say"),
        ("steps", lambda run: str(run.steps)),
        ("training loss, first", lambda run: _loss(run.curve("train_loss")[:1])),
        ("training loss, last", lambda run: _loss(run.curve("train_loss")[-1:])),
    ]
    if common is not None:
        rows.append((f"training loss, step {common}", lambda run: _loss(_at(run.curve("train_loss"), common))))
    held = [{step for step, _ in validation(run)} for run in found.runs]
    rows.append(("held-out loss, first", lambda run: _loss(validation(run)[:1])))
    rows.append(("held-out loss, best", lambda run: _best(validation(run))))
    rows.append(("held-out loss, last", lambda run: _loss(validation(run)[-1:])))
    if both := set.intersection(*held):
        step = max(both)
        rows.append((f"held-out loss, step {step}", lambda run: _loss(_at(validation(run), step))))
    rows += [
        ("tokens/s", lambda run: _told(run.median("tokens_per_s"), "{:.4g}".format)),
        ("iteration", lambda run: _told(run.median("step_s"), format_seconds)),
        ("step, start to start", lambda run: _told(run.median("wall_step_s"), format_seconds)),
        ("device peak", lambda run: _told(_peak(run, "device_peak_bytes", "device_peak_gb"), format_bytes)),
        ("RAM peak", lambda run: _told(_peak(run, "host_peak_bytes", "host_peak_gb"), format_bytes)),
        ("RAM of the process", lambda run: _told(run.largest("process_peak_bytes"), format_bytes)),
        ("model FLOPs use", lambda run: _told(run.median("mfu"), "{:.1%}".format)),
    ]
    shown = [(name, tuple(value(run) or NONE for run in found.runs)) for name, value in rows]
    return [row for row in shown if set(row[1]) != {NONE}]


def plan_differences(found: RunComparison) -> list[Row]:
    """Return what the plans say differently; nothing if at most one run has a plan."""
    if sum(run.plan is not None for run in found.runs) < 2:
        return []
    rows: list[tuple[str, Callable[[Plan], str]]] = [
        ("planner", lambda plan: plan.planner),
        ("device budget", lambda plan: format_bytes(plan.budget_bytes)),
        ("RAM budget", lambda plan: format_bytes(plan.host_budget_bytes)),
        ("batch", samples_of),
        ("micro-batches", lambda plan: str(plan.accumulate)),
        ("iteration, planned", lambda plan: format_seconds(plan.predicted.iteration_s)),
        ("lower bound", lambda plan: format_seconds(plan.predicted.lower_bound_s)),
        ("to the device", lambda plan: _travels(plan, "h2d")),
        ("to the host", lambda plan: _travels(plan, "d2h")),
        ("activations", lambda plan: _counts(plan.options)),
        ("updates", lambda plan: _counts(place for place in plan.update_places if place != "none")),
        ("model structure", lambda plan: plan.fingerprint),
    ]
    shown = [(name, tuple(NONE if run.plan is None else value(run.plan) for run in found.runs)) for name, value in rows]
    return [row for row in shown if len(set(row[1])) > 1]


def setting_differences(found: RunComparison) -> list[Row]:
    """Return the settings that are not the same in all runs, by their dotted names."""
    names = dict.fromkeys(name for run in found.runs for name in run.settings if name not in _OF_A_PLACE)
    rows = [(name, tuple(_setting(run, name) for run in found.runs)) for name in names if not _answered(name, found)]
    return [row for row in rows if len(set(row[1])) > 1]


def _setting(run: RunFolder, name: str) -> str:
    value = run.settings.get(name)
    # A class has its arguments below it: the end of its path says enough.
    is_class = isinstance(value, str) and any(other.startswith(f"{name}.") for other in run.settings)
    return plainly(value).rpartition(".")[2] if is_class else plainly(value)


def _answered(name: str, found: RunComparison) -> bool:
    """Return whether the difference is told by another row: that of the group, or those of its members."""
    parts = name.split(".")
    groups = [".".join(parts[:count]) for count in range(1, len(parts))]
    if any(len({_setting(run, group) for run in found.runs}) > 1 for group in groups):
        return True  # a run has something else in its place
    members = any(other.startswith(f"{name}.") for run in found.runs for other in run.settings)
    return members and all(run.settings.get(name) is None for run in found.runs)


def trajectories(found: RunComparison) -> list[str]:
    """Return, of each run but the first, whether its training losses are those of the first one, bit for bit."""
    first = dict(found.runs[0].curve("train_loss"))
    said = []
    for name, run in zip(found.names[1:], found.runs[1:], strict=True):
        other = dict(run.curve("train_loss"))
        steps = sorted(first.keys() & other.keys())
        # Numbers that are not numbers are the same if both are; nothing else equals them.
        differing = [s for s in steps if first[s] != other[s] and not (first[s] != first[s] and other[s] != other[s])]
        of = f"{name} and {found.names[0]}"
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


# -- the page --------------------------------------------------------------------------------------------------------


def write_comparison(path: str | Path, found: RunComparison) -> Path:
    """Write a page with curves over each other to ``path`` and return the path."""
    title = " and ".join(found.names) if len(found.names) == 2 else f"{len(found.names)} runs"
    same = "".join(f"<p>{unbroken(escape(sentence))}</p>" for sentence in trajectories(found))
    settings = setting_differences(found)
    more = f" The first {MOST_SETTINGS} of {len(settings)}." if len(settings) > MOST_SETTINGS else ""
    charts = [
        _over(found, "tokens_per_s", "Tokens per second"),
        _over(found, "wall_step_s", "Step time, start to start", suffix=" s"),
        _over(found, "step_s", "Iteration", suffix=" s"),
        memory_figure("Device memory", list(_curves(found, "device_peak_gb"))),
        memory_figure("RAM", list(_curves(found, "host_peak_gb"))),
        _over(found, "grad_norm", "Gradient norm"),
        _over(found, "lr", "Learning rate"),
    ]
    body = [
        plan_page.header(title, "comparison", [run.model for run in found.runs]),
        f'<div class="lead">{same}</div>',
        "" if found.labels == found.names else pairs(zip(found.labels, found.names, strict=True)),
        section(
            "Training",
            "",
            loss_figure(list(zip(found.labels, found.runs, strict=True))),
            f'<div class="charts">{"".join(charts)}</div>',
        ),
        _section("Figures", "Speeds and times are medians of the second half of each run.", found, figures(found)),
        _section("Settings that differ", more.strip(), found, settings[:MOST_SETTINGS]),
        _section("Plans that differ", "", found, plan_differences(found)),
        "<footer>Made by lt_offload.</footer>",
    ]
    return plan_page.write(Path(path), page(title, body))


def _section(title: str, note: str, found: RunComparison, rows: Sequence[Row]) -> str:
    if not rows:
        return section(title, "None.") if "Settings" in title else ""
    cells = [[escape(name), *(escape(value) for value in values)] for name, values in rows]
    head = ("what", *(escape(label) for label in found.labels))
    return section(title, note, table(head, cells, numeric=range(1, len(head)), label=title))


def _over(found: RunComparison, name: str, title: str, *, suffix: str = "") -> str:
    return lines(title, list(_curves(found, name)), suffix=suffix)


def _curves(found: RunComparison, name: str) -> Iterator[Line]:
    for number, (run_name, run) in enumerate(zip(found.labels, found.runs, strict=True)):
        curve = run.curve(name)
        if curve:
            # Where curves are equal, both are seen.
            style = {"color": COLORS[number % len(COLORS)], "dash": "dash" if number else "solid"}
            yield Line.through(curve, run_name, smooth=name != "lr", **style)


# -- values ----------------------------------------------------------------------------------------------------------


def _loss(points: Curve) -> str | None:
    return f"{points[-1][1]:.4f}" if points else None


def _at(curve: Curve, step: int) -> Curve:
    return [point for point in curve if point[0] == step]


def _best(curve: Curve) -> str | None:
    if not curve:
        return None
    step, loss = min(curve, key=lambda point: point[1])
    return f"{loss:.4f} at {step}"


def _told(value: T | None, tell: Callable[[T], str]) -> str | None:
    return None if value is None else tell(value)


def _peak(run: RunFolder, name: str, metric: str) -> int | None:
    # A run that was killed has written no summary, but its metrics.
    logged = [round(value * 1e9) for _, value in run.curve(metric)]
    return run.largest(name) or max(logged, default=None)


def _counts(names: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


def _travels(plan: Plan, lane: str) -> str:
    return format_bytes(
        sum(count * op.bytes for op, count in zip(plan.ops, plan.counts, strict=True) if op.lane == lane)
    )
