"""The report of a run: drawn from its folder alone, as far as the run came, with a plan or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path

from lt_offload.plan import simulate
from lt_offload.plan.what_if import Gain
from lt_offload.report import plan_page
from lt_offload.report.drawing import COLORS, OUT_OF_VIEW, Line, lines, page, unbroken
from lt_offload.report.processes import ProcessTimes, process_table, slowest
from lt_offload.report.processes import told as processes_told
from lt_offload.report.runs import Curve, RunFolder, RunSample, read_run
from lt_offload.report.tables import NONE, bar_list, pairs, section, table
from lt_offload.schema.explain import brief
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_seconds

PHASES = {
    "start": "starting",
    "steps": "steps",
    "between": "between steps",
    "validation": "validation",
    "samples": "samples",
    "checkpoints": "checkpoints",
}
"""Where the time of a run goes."""
_FEW = 20
"""Points of a curve from which on a smoothed one is drawn."""
_ROWS = 12
"""Rows of the table beside the curves."""
_NOTICEABLE = 0.01
"""A difference of two times that is worth a word."""


def write_run_report(folder: str | Path, gains: Sequence[Gain] = ()) -> Path:
    """Write ``report.html`` into the run folder ``folder`` and return its path.

    Args:
        folder: the run folder.
        gains: what more of each lane would buy.
    """
    run = read_run(folder)
    return plan_page.write(run.path / "report.html", _page(run, gains))


def _page(run: RunFolder, gains: Sequence[Gain]) -> str:
    plan, profile = run.plan, run.profile
    planned: list[str] = []
    title, about = run.model, []
    if plan is not None and profile is not None:
        title, about = f"{run.model} in {format_bytes(plan.budget_bytes)}", plan_page.about(plan, profile)
        predicted = simulate(plan, profile)
        paragraph = brief(plan).partition("\n\n")[0]  # without the curve of batch sizes, which is drawn
        planned = [
            section(
                "Planned and measured",
                "",
                f"<p>{unbroken(escape(paragraph))}</p>",
                plan_page.times(plan, list(_measured(run))),
                _differences(run, predicted),
            ),
            *plan_page.sections(plan, profile, predicted, run.trace, gains),
        ]
    last = run.parts[-1] if run.parts else None
    steps = "1 step" if run.steps == 1 else f"{run.steps} steps"
    ended = f", {last.ended}" if last is not None and last.ended != "finished" else ""
    return page(
        title,
        [
            plan_page.header(title, f"training report · {steps}{ended}", about or [run.name]),
            f'<p class="lead">{unbroken(escape(_lead(run)))}</p>',
            plan_page.figures(_figures(run)),
            _training(run),
            _processes(run),
            _samples(run.samples),
            planned[0] if planned else "",
            _whole_run(run),
            *planned[1:],
            _settings(run),
            "<footer>Made by lt_offload. The same data is in the run folder: metrics.csv, samples.jsonl, summary.json, "
            "environment.json, config.yaml; with a plan also plan.json, profile.json and trace.json; "
            "trace.perfetto.json opens in ui.perfetto.dev and chrome://tracing.</footer>",
        ],
    )


# -- headline --------------------------------------------------------------------------------------------------------


def _lead(run: RunFolder) -> str:
    told = []
    last = run.parts[-1] if run.parts else None
    if last is not None and last.ended == "failed":
        told.append(f"The run failed after step {last.last_step}: {last.error}.")
    elif last is not None and last.ended == "interrupted":
        told.append(f"The run was interrupted after step {last.last_step}; --resume goes on from its checkpoint.")
    elif last is None:
        told.append("The run did not end by itself, or still goes on; this is as far as it came.")
    if len(run.parts) > 1:
        starts = ", ".join(str(part.first_step) for part in run.parts[1:])
        told.append(f"It was resumed after step {starts}.")
    losses = validation(run)
    if len(losses) > 1:
        told.append(f"The loss on held-out data went from {losses[0][1]:.4f} to {losses[-1][1]:.4f}.")
    step = _step_s(run)
    if run.plan is not None and run.profile is not None:
        told.append(plan_page.size_and_budget(run.plan, run.profile))
        if step is not None:
            promise = run.plan.predicted.iteration_s
            ratio = f", {step / promise:.2f} times the planned {format_seconds(promise)}" if promise else ""
            told.append(f"One iteration took {format_seconds(step)}{ratio}.")
        told.append(plan_page.bounds(run.plan))
    elif step is not None:
        told.append(f"One step took {format_seconds(step)}; there was no plan.")
    if (times := _times(run)) and slowest(times) is not None:
        told.append(f"Of {len(times)} processes {processes_told(times)}.")
    told += run.warnings
    return " ".join(told)


def _times(run: RunFolder) -> list[ProcessTimes]:
    return run.parts[-1].times if run.parts else []


def _processes(run: RunFolder) -> str:
    """Return who of several processes waits how long for whom."""
    times = _times(run)
    if not times:
        return ""
    sentence = processes_told(times)
    what = f"Medians of a step: {sentence}. What is waited for is the last process, before a batch and before sums."
    return section("Processes", what, process_table(times))


def _figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    losses = validation(run)
    if losses:
        before = f"{losses[0][1]:.3f} at step {losses[0][0]}" if len(losses) > 1 else f"at step {losses[0][0]}"
        yield "Held-out loss", f"{losses[-1][1]:.3f}", before
    if rate := run.median("tokens_per_s"):
        trained = run.median("trained_tokens_per_s")
        yield "Tokens per second", f"{rate:.4g}", f"{trained:.4g} of them trained on" if trained else "real tokens"
    step = _step_s(run)
    if step is not None:
        planned = f"planned {format_seconds(run.plan.predicted.iteration_s)}" if run.plan is not None else "median"
        yield "Step time", format_seconds(step), planned
    peak = run.largest("device_peak_bytes")
    if run.plan is not None:
        yield "Device peak", format_bytes(peak or 0), f"of {format_bytes(run.plan.budget_bytes)} allowed"
    elif peak:
        yield "Device peak", format_bytes(peak), "as torch counts it"
    ram = run.largest("host_peak_bytes")
    whole = run.largest("process_peak_bytes")
    process = f"the process {format_bytes(whole)}" if whole else ""
    if ram and run.plan is not None:
        yield "RAM peak", format_bytes(ram), f"of {format_bytes(run.plan.host_budget_bytes)} allowed; {process}"
    elif whole:
        yield "RAM peak", format_bytes(whole), "of the process, libraries included"
    use = run.median("mfu")
    source = next((part.peak_source for part in reversed(run.parts) if part.peak_source), "the rated peak")
    if use is not None:
        yield "Model FLOPs use", f"{use:.1%}", escape(f"of {source}")
    if run.plan is not None and step is not None:
        yield from plan_page.bound_figures(run.plan, step)


def validation(run: RunFolder) -> Curve:
    """Return the validation losses, that before training included."""
    before = [(0, part.loss_before) for part in run.parts if part.loss_before is not None and part.first_step == 0]
    return [*before[-1:], *run.curve("val_loss")]


def _step_s(run: RunFolder) -> float | None:
    """Return the median iteration where the engine measures it, else the median step."""
    logged = run.median("step_s")
    if logged is not None:
        return logged
    found = [value for part in run.parts if (value := part.medians.get("step_s")) is not None]
    return found[-1] if found else run.median("wall_step_s")


# -- curves ----------------------------------------------------------------------------------------------------------


def _training(run: RunFolder) -> str:
    if not run.curves:
        return section("Training", "No metrics were logged: there is no metrics.csv in the run folder.")
    drawn = [
        _one(run, "lr", "Learning rate"),
        _one(run, "grad_norm", "Gradient norm", faint=True),
        _one(run, "tokens_per_s", "Tokens per second", also=("trained_tokens_per_s", "trained on")),
        _step_times(run),
        _memory(run, "device_peak_gb", "Device memory"),
        _memory(run, "host_peak_gb", "RAM"),
        _one(run, "mfu", "Model FLOPs use"),
    ]
    without = ""
    if not run.curve("grad_norm") and run.curve("train_loss"):
        without = " The gradient norm was not logged: nothing had to compute it."
    return section(
        "Training",
        "Every figure over the steps that were done; drag to see a part of it, click twice to see all." + without,
        loss_figure([(run.name, run)]),
        f'<div class="charts">{"".join(drawn)}</div>',
        _table(run),
    )


def loss_figure(runs: Sequence[tuple[str, RunFolder]]) -> str:
    """Return the curves of the loss of one run, or of several with their names."""
    curves = []
    for number, (run_name, run) in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        other = COLORS[1] if len(runs) == 1 else color
        prefix = "" if len(runs) == 1 else f"{run_name}, "
        dash = "dash" if number else "solid"  # where curves are equal, both are seen
        raw = run.curve("train_loss")
        # The mean of a few points says less than the points.
        if len(raw) > _FEW:
            if len(runs) == 1:
                curves.append(Line.through(raw, "training, each step", color=color, faint=True))
            curves.append(Line.through(raw, f"{prefix}training, smoothed", smooth=True, color=color, dash=dash))
        elif raw:
            curves.append(Line.through(raw, f"{prefix}training", color=color, dash=dash))
        if held := validation(run):
            dotted = "solid" if len(runs) == 1 else "dot"
            curves.append(Line.through(held, f"{prefix}held out", color=other, points=True, dash=dotted))
    return lines("Loss", curves, y_title="per token", from_zero=False, height=320)


def _one(run: RunFolder, name: str, title: str, *, also: tuple[str, str] | None = None, faint: bool = False) -> str:
    main = run.curve(name)
    curves = [Line.through(main, "all" if also else title)]
    if also is not None and run.curve(also[0]):
        curves.append(Line.through(run.curve(also[0]), also[1], color=COLORS[1]))
    if faint and len(main) > _FEW:
        curves = [Line.through(main, "each step", faint=True), Line.through(main, "smoothed", smooth=True)]
    return lines(title, curves)


def _step_times(run: RunFolder) -> str:
    """Return the figure of step times, with the planned one as a line."""
    inner, outer = run.curve("step_s"), run.curve("wall_step_s")
    curves = [Line.through(outer, "start to start", color=COLORS[1])] if outer else []
    if inner:
        curves.append(Line.through(inner, "iteration"))
    limit = None
    if run.plan is not None and inner:
        promise = run.plan.predicted.iteration_s
        limit = (promise, f"planned {format_seconds(promise)}")
    return lines("Step time", curves, suffix=" s", limit=limit)


def _memory(run: RunFolder, name: str, title: str) -> str:
    budget = 0
    if run.plan is not None:
        budget = run.plan.budget_bytes if name == "device_peak_gb" else run.plan.host_budget_bytes
    limit = (budget / 1e9, f"budget {format_bytes(budget)}") if budget else None
    return memory_figure(title, [Line.through(run.curve(name), title)], limit)


def memory_figure(title: str, curves: Sequence[Line], limit: tuple[float, str] | None = None) -> str:
    """Return curves of GB as a figure in a unit that suits them; ``limit`` is a level in GB and its name."""
    most = max((y for curve in curves for y in curve.ys if y is not None), default=1.0)
    unit, scale = next(((u, f) for u, f in (("GB", 1.0), ("MB", 1e3)) if most * f >= 1), ("kB", 1e6))
    scaled = [replace(curve, ys=[None if y is None else y * scale for y in curve.ys]) for curve in curves]
    level = None if limit is None else (limit[0] * scale, limit[1])
    hidden = f"; {limit[1]}" if limit is not None and limit[0] > OUT_OF_VIEW * most else ""
    return lines(title, scaled, suffix=f" {unit}", limit=level, y_title=f"peak of each step{hidden}")


def _table(run: RunFolder) -> str:
    """Return the same figures at a few steps, for those who cannot see the curves."""
    losses = run.curve("train_loss") or validation(run)
    if not losses:
        return ""
    steps = sorted({step for step, _ in losses} | {step for step, _ in validation(run)})
    every = -(-len(steps) // _ROWS)
    kept = sorted({*steps[::every], steps[-1]})
    columns = {
        "training loss": dict(run.curve("train_loss")),
        "held-out loss": dict(validation(run)),
        "learning rate": dict(run.curve("lr")),
        "gradient norm": dict(run.curve("grad_norm")),
        "tokens/s": dict(run.curve("tokens_per_s")),
        "step": dict(run.curve("step_s") or run.curve("wall_step_s")),
    }
    columns = {name: values for name, values in columns.items() if values}

    def cell(name: str, step: int) -> str:
        value = columns[name].get(step)
        if value is None:
            return NONE
        return format_seconds(value) if name == "step" else f"{value:.4g}"

    rows = [[str(step), *(cell(name, step) for name in columns)] for step in kept]
    shown = table(("after step", *columns), rows, numeric=range(len(columns) + 1), label="Figures at some steps")
    return f"<details><summary>As a table</summary>{shown}</details>"


# -- samples ---------------------------------------------------------------------------------------------------------


def _samples(samples: Sequence[RunSample]) -> str:
    """Return what the model wrote over time, per prompt; the last one is in full view."""
    if not samples:
        return ""
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    shown = []
    for prompt in prompts:
        mine = [sample for sample in samples if sample.prompt == prompt]
        shown.append(_quoted(mine[-1]))
        if earlier := mine[:-1]:
            quoted = "".join(_quoted(sample) for sample in earlier)
            name = "1 earlier sample" if len(earlier) == 1 else f"{len(earlier)} earlier samples"
            shown.append(f"<details><summary>{name}</summary>{quoted}</details>")
    return section("Samples", "What the model wrote; the most likely token each time. The prompt is grey.", *shown)


def _quoted(sample: RunSample) -> str:
    when = f"after step {sample.step}" if sample.step else "before training"
    loss = f", held-out loss {sample.val_loss:.3f}" if sample.val_loss is not None else ""
    return (
        f'<blockquote><small class="when">{when}{loss}</small><span class="prompt">{escape(sample.prompt)}</span>'
        f"{escape(sample.text)}</blockquote>"
    )


# -- planned and measured --------------------------------------------------------------------------------------------


def _measured(run: RunFolder) -> Iterator[tuple[str, float]]:
    if run.trace is not None:
        yield "drawn iteration", run.trace.iteration_time
    step = _step_s(run)
    if step is not None:
        yield "median iteration", step


def _differences(run: RunFolder, predicted: Trace) -> str:
    """Return why the planned iteration, the drawn one and a step of the run take different times."""
    rows = [["planned iteration", format_seconds(predicted.iteration_time), "", "the plan, simulated"]]
    before = predicted.iteration_time
    trace = run.trace
    if trace is not None:
        rows.append(["drawn iteration", *_changed(before, trace.iteration_time), _why(predicted, trace)])
        before = trace.iteration_time
    medians = run.parts[-1].medians if run.parts else {}
    iterations = [value for _, value in run.curve("step_s")]
    if (middle := medians.get("iteration_s")) is not None:
        ordered = sorted(iterations)
        spread = ""
        if len(ordered) >= 5:
            # Without the outer tenths: a single disturbed iteration says nothing about the others.
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            spread = f"; 8 of 10 took {format_seconds(low)} to {format_seconds(high)}"
        why = f"median of all iterations; the drawn one is the last{spread}"
        rows.append(["median iteration", *_changed(before, middle), why])
        before = middle
    if (step := medians.get("step_s")) is not None:
        why = "the loss read back, hooks of callbacks, schedule: what a step does besides its iteration"
        rows.append(["median step", *_changed(before, step), why])
        if (gap := medians.get("between_s")) is not None:
            why = "the next batch, logging, the progress bar; validation, samples and checkpoints are below"
            rows.append(["from start to start", *_changed(step, step + gap), why])
    if len(rows) == 1:
        return ""
    return table(
        ("what", "time", "more", "why"), rows, numeric=(1, 2), label="Times of an iteration and why they differ"
    )


def _changed(before: float, now: float) -> tuple[str, str]:
    difference = now - before
    if abs(difference) < _NOTICEABLE * before:
        return format_seconds(now), NONE
    return format_seconds(now), f"{'+' if difference > 0 else '−'}{format_seconds(abs(difference))}"


def _why(predicted: Trace, measured: Trace) -> str:
    """Return what of the difference is work of the device, and what is waiting."""
    if abs(measured.iteration_time - predicted.iteration_time) < _NOTICEABLE * predicted.iteration_time:
        return "the last iteration of the run, as recorded: as planned"
    parts = []
    work = measured.busy("compute") - predicted.busy("compute")
    waiting = measured.iteration_time - predicted.iteration_time - work
    for seconds, more, less in ((work, "computes", "computes"), (waiting, "waits", "waits")):
        if abs(seconds) >= _NOTICEABLE * predicted.iteration_time:
            verb, word = (more, "longer") if seconds > 0 else (less, "less")
            parts.append(f"{verb} {format_seconds(abs(seconds))} {word}")
    return f"the last iteration of the run, as recorded: the device {' and '.join(parts) or 'works as planned'}"


def _whole_run(run: RunFolder) -> str:
    """Return where the time of the run went."""
    totals = {name: sum(part.seconds.get(name, 0.0) for part in run.parts) for name in PHASES}
    whole = sum(totals.values())
    if not whole:
        return ""
    rows = [
        (PHASES[name], seconds, f"{format_seconds(seconds)} ({seconds / whole:.0%})")
        for name, seconds in totals.items()
        if seconds
    ]
    resumed = f", in {len(run.parts)} parts" if len(run.parts) > 1 else ""
    tokens = sum(part.tokens for part in run.parts)
    trained = sum(part.trained_tokens for part in run.parts)
    seen = f" {tokens:,} real tokens were seen, {trained:,} of them trained on." if tokens else ""
    return section(
        "Where the time went",
        f"The whole run took {format_seconds(whole)}{resumed}.{seen} Starting is reading data, loading, measuring and "
        "planning; between steps are the next batch, logging and the progress bar.",
        bar_list(rows),
    )


# -- settings --------------------------------------------------------------------------------------------------------


def _settings(run: RunFolder) -> str:
    """Return the recipe's settings, by group, and versions and machine."""
    content = []
    chosen = [(name, value) for name, value in run.settings.items() if value is not None]
    for group, some in groupby(chosen, key=lambda item: item[0].partition(".")[0]):
        shown = pairs((name.removeprefix(f"{group}."), plainly(value)) for name, value in some)
        content.append(f"<h3>{escape(group)}</h3>{shown}")
    surroundings = ""
    if run.environment:
        described = (
            (name.removesuffix("_bytes").replace("_", " "), _described(name, value))
            for name, value in run.environment.items()
        )
        surroundings = section("Versions and machine", "", pairs(described))
    settings = f"<details><summary>All settings</summary>{''.join(content)}</details>" if content else ""
    return surroundings + (section("Settings", "As in config.yaml, which is a recipe.", settings) if settings else "")


def plainly(value: object) -> str:
    """Return the value of a setting as it is written in YAML, shortened."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "class_path" in part for part in value):
        return ", ".join(str(part["class_path"]).rpartition(".")[2] for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _described(name: str, value: object) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
