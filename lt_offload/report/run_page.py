"""The page of a run: drawn from its folder alone, as far as the run came, with a plan or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from lt_offload import nested
from lt_offload.plan import simulate
from lt_offload.plan.what_if import Gain
from lt_offload.report import plan_page
from lt_offload.report.compare import described
from lt_offload.report.page import LIMIT, drawn, section, table, thinned, write_page
from lt_offload.report.runs import RunFolder, RunSample, read_run, told
from lt_offload.schema.lanes import shown
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_seconds

_PHASES = {
    "start": "starting: reading data, loading, measuring and planning",
    "steps": "steps",
    "between": "between steps: the next batch, logging, the progress bar",
    "validation": "validation",
    "samples": "samples",
    "checkpoints": "checkpoints",
}
"""Uses of the time of a run, by the phases that its clock tells apart."""
_CURVES: tuple[tuple[str, dict[str, str], float, str], ...] = (
    ("Loss per token", {"train_loss": "training", "val_loss": "held out"}, 1, ""),
    ("Learning rate", {"lr": "learning rate"}, 1, ""),
    ("Gradient norm", {"grad_norm": "gradient norm"}, 1, ""),
    ("Tokens per second", {"tokens_per_s": "all tokens", "trained_tokens_per_s": "trained on"}, 1, ""),
    ("Step time", {"wall_step_s": "start to start", "step_s": "iteration"}, 1, "s"),
    ("Device memory", {"device_peak_gb": "peak of device memory"}, 1e9, "B"),
    ("RAM", {"host_peak_gb": "peak of RAM"}, 1e9, "B"),
    ("Model FLOPs use", {"mfu": "model FLOPs use"}, 1, ""),
)
"""Metrics that share an axis: its title, the metrics with their names, the factor that gives them its unit."""
_HEIGHT = 190


def write_run_report(folder: str | Path, gains: Sequence[Gain] = ()) -> Path:
    """Write ``report.html`` into the run folder ``folder`` and return its path; ``gains``: what more would buy."""
    run = read_run(folder)
    plan, profile = run.plan, run.profile
    title, about, planned = run.model, run.name, []
    if plan is not None and profile is not None:
        title, about = plan_page.title(run.model, plan), plan_page.task(plan, profile)
        traces = {"Predicted": simulate(plan, profile)} | ({"Measured": run.trace} if run.trace is not None else {})
        compared, note = _compared(run, traces["Predicted"]), plan_page.paragraph(plan, profile)
        planned = [section("Planned and measured", note, compared), *plan_page.sections(plan, profile, traces, gains)]
    figure = curves(run)
    ends = (f"{name} {curve[0][1]:.4g} to {curve[-1][1]:.4g}" for name, curve in run.curves.items())
    steps = "1 step" if run.steps == 1 else f"{run.steps} steps"
    ended = f", {run.parts[-1].ended}" if run.parts and run.parts[-1].ended != "finished" else ""
    parts = [
        f"<p>{escape(' '.join([*_ends(run), *run.warnings]))}</p>",
        section("Figures", "Speeds and times are medians of the second half.", table((), described(run).items())),
        section(
            "Training",
            "Drag to see a part of the steps, click twice to see all.",
            drawn(figure, "curves", f"Metrics over steps: {', '.join(ends)}") if figure.data else "",
        ),
        _processes(run),
        section("Samples", "The most likely token each time; the prompt is grey.", *_samples(run.samples)),
        *planned[:1],
        _phases(run),
        *planned[1:],
        section("Settings, versions and machine", "As in config.yaml, a recipe, and environment.json.", _settings(run)),
    ]
    return write_page(run.path / "report.html", title, f"training report · {steps}{ended} · {about}", parts)


def _ends(run: RunFolder) -> Iterator[str]:
    last = run.parts[-1] if run.parts else None
    if last is None:
        yield "The run did not end by itself, or still goes on; this is as far as it came."
    elif last.ended == "failed":
        yield f"The run failed after step {last.last_step}: {last.error}."
    elif last.ended == "interrupted":
        yield f"The run was interrupted after step {last.last_step}; --resume goes on from its checkpoint."
    if len(run.parts) > 1:
        yield f"It was resumed after step {', '.join(str(part.first_step) for part in run.parts[1:])}."
    if run.plan is None:
        yield "There was no plan."
    if not run.curves:
        yield "No metrics were logged: there is no metrics.csv in the run folder."


# -- curves ----------------------------------------------------------------------------------------------------------


def curves(run: RunFolder) -> Figure:
    """Return the figure of all metrics over the steps that were done; they share the horizontal axis."""
    limits: dict[str, tuple[str, float]] = {}
    if (plan := run.plan) is not None:
        limits["Step time"] = f"planned {format_seconds(plan.predicted.iteration_s)}", plan.predicted.iteration_s
        limits["Device memory"] = f"budget {format_bytes(plan.budget_bytes)}", plan.budget_bytes
        limits["RAM"] = f"budget {format_bytes(plan.host_budget_bytes)}", plan.host_budget_bytes
    rows = [row for row in _CURVES if any(run.curve(name) for name in row[1])]
    if not rows:
        return Figure()
    figure = make_subplots(
        rows=len(rows),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.24 / len(rows),
        subplot_titles=[f"{title}, {limits[title][0]}" if title in limits else title for title, *_ in rows],
    )
    for number, (title, metrics, factor, unit) in enumerate(rows, start=1):
        for metric, name in metrics.items():
            curve = run.losses["held-out loss"] if metric == "val_loss" else run.curve(metric)
            if not curve:
                continue
            points = thinned([(step, value * factor) for step, value in curve])
            figure.add_scatter(
                row=number,
                col=1,
                x=[step for step, _ in points],
                y=[value for _, value in points],
                name=name,
                mode="lines+markers" if metric == "val_loss" or len(points) == 1 else "lines",
                showlegend=len(metrics) > 1,
            )
        if title in limits:
            figure.add_hline(limits[title][1], row=number, col=1, line=LIMIT)
        letters = "~s" if unit else "~g"
        zero = "normal" if "train_loss" in metrics else "tozero"
        figure.update_yaxes(row=number, col=1, tickformat=letters, ticksuffix=unit, nticks=5, rangemode=zero)
    figure.update_layout(height=80 + _HEIGHT * len(rows), hovermode="x")
    figure.update_xaxes(row=len(rows), col=1, title="step")
    return figure


# -- planned and measured --------------------------------------------------------------------------------------------


def _compared(run: RunFolder, predicted: Trace) -> str:

    def row(name: str, planned: float, actual: float, show: Callable[[Any], str]) -> tuple[str, ...]:
        difference = f"{'+' if actual >= planned else '−'}{show(abs(actual - planned))}"
        return name, show(planned), show(actual), difference

    rows = []
    if run.trace is not None:
        measured = run.trace
        rows.append(row("last iteration", predicted.iteration_time, measured.iteration_time, format_seconds))
        for lane in shown(span.lane for span in (*predicted.spans, *measured.spans)):
            busy = predicted.busy(lane.name), measured.busy(lane.name)
            rows.append(row(f"{lane.title}, busy", *busy, format_seconds))
        rows.append(row("device memory", predicted.device_peak, measured.device_peak, format_bytes))
        rows.append(row("RAM", predicted.host_peak, measured.host_peak, format_bytes))
    if (median := run.median("step_s")) is not None:
        rows.append(row("median iteration", predicted.iteration_time, median, format_seconds))
    return table(("", "planned", "measured", "difference"), rows)


def _phases(run: RunFolder) -> str:
    """Return the section about how the time of the run was spent."""
    totals = {use: sum(part.seconds.get(phase, 0.0) for part in run.parts) for phase, use in _PHASES.items()}
    whole = sum(totals.values())
    resumed = f", in {len(run.parts)} parts" if len(run.parts) > 1 else ""
    tokens, trained = (sum(getattr(part, name) for part in run.parts) for name in ("tokens", "trained_tokens"))
    seen = f" {tokens:,} real tokens were seen, {trained:,} of them trained on." if tokens else ""
    rows = [(use, format_seconds(spent), f"{spent / whole:.0%}") for use, spent in totals.items() if spent]
    note = f"The whole run took {format_seconds(whole)}{resumed}.{seen}"
    return section("Where the time went", note, table(("", "time", "share"), rows))


def _processes(run: RunFolder) -> str:
    """Return the section about several processes: their times of a step, and how much of it is waiting."""
    times = run.parts[-1].processes if run.parts else ()
    rows = [
        (one.name, *map(format_seconds, (one.step_s, one.own_s, one.waited_s)))
        for one in sorted(times, key=lambda one: -one.own_s)
    ]
    note = f"Of {len(times)} processes {told(times)}. Times are medians of a step."
    return section("Processes", note, table(("process", "step", "its own part", "waiting for others"), rows))


# -- samples and settings --------------------------------------------------------------------------------------------


def _samples(samples: Sequence[RunSample]) -> Iterator[str]:
    """Yield the generated texts; the last one of each prompt is in full view."""
    last = {sample.prompt: sample for sample in samples}
    yield from map(_quoted, last.values())
    if earlier := [sample for sample in samples if sample is not last[sample.prompt]]:
        yield f"<details><summary>{len(earlier)} before</summary>{''.join(map(_quoted, earlier))}</details>"


def _quoted(sample: RunSample) -> str:
    when = f"after step {sample.step}" if sample.step else "before training"
    loss = f", held-out loss {sample.val_loss:.3f}" if sample.val_loss is not None else ""
    prompt = f'<span class="prompt">{escape(sample.prompt)}</span>'
    return f"<blockquote><small>{when}{loss}</small>\n{prompt}{escape(sample.text)}</blockquote>"


def _settings(run: RunFolder) -> str:
    rows = [(name, nested.shown(value, 200)) for name, value in run.settings.items() if value is not None]
    for name, value in run.environment.items():
        is_size = isinstance(value, int) and name.endswith("_bytes")
        rows.append((name.removesuffix("_bytes"), format_bytes(value) if is_size else str(value)))
    return f"<details><summary>All settings</summary>{table((), rows)}</details>" if rows else ""
