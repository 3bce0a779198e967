"""The report of a plan, and the sections about a plan of the report of a run.

It needs no trainer, so that a plan can be reported on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from lt_offload.plan.what_if import Gain
from lt_offload.report import tables, timeline
from lt_offload.report.drawing import Line, lines, page, unbroken
from lt_offload.report.tables import NONE, bar_list, section, table
from lt_offload.schema.explain import samples_of
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_rate, format_seconds

_COMMON_AXIS = 3.0
"""Two iterations share one time scale unless one is so many times longer than the other."""


def write_plan_report(
    path: str | Path, plan: Plan, profile: Profile, predicted: Trace, gains: Sequence[Gain] = ()
) -> Path:
    """Write the report of a plan to ``path`` and return the path; ``gains`` are what more of each lane would buy."""
    return write(Path(path), _page(plan, profile, predicted, gains))


def write(path: Path, html: str) -> Path:
    """Write a page, and its folder where there is none; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def _page(plan: Plan, profile: Profile, predicted: Trace, gains: Sequence[Gain]) -> str:
    title = f"{plan.model} in {format_bytes(plan.budget_bytes)}"
    return page(
        title,
        [
            header(title, "plan", about(plan, profile)),
            f'<p class="lead">{unbroken(_lead(plan, profile))}</p>',
            _figures(plan, profile),
            times(plan),
            *sections(plan, profile, predicted, None, gains),
            "<footer>Made by lt_offload.</footer>",
        ],
    )


def header(title: str, kind: str, details: Iterable[str]) -> str:
    """Return the head of a page; all is text."""
    return f"<header><h1>{escape(title)}</h1><p>{kind} · {escape(', '.join(details))}</p></header>"


def about(plan: Plan, profile: Profile) -> list[str]:
    """Return what the plan is for, in a few words."""
    return [samples_of(plan, "×"), profile.dtype, profile.optimizer.name, profile.hardware.name]


def sections(
    plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None, gains: Sequence[Gain]
) -> list[str]:
    """Return all that is told about a plan below its headline figures."""
    return [
        _iterations(plan, profile, predicted, measured),
        tables.gains(plan, gains),
        _batch(plan),
        tables.decisions(plan, profile),
        tables.traffic(plan, profile, predicted, measured),
        tables.alternatives(plan, predicted.iteration_time),
        tables.settings(plan, profile),
    ]


def needed(profile: Profile) -> int:
    """Return the bytes of weights, gradients and optimizer state."""
    return sum(t.bytes * (2 if t.trainable else 1) + t.state_bytes for t in profile.tensors)


def size_and_budget(plan: Plan, profile: Profile) -> str:
    """Return a sentence about how much there is and how much it may take."""
    return (
        f"Weights, gradients and optimizer state take {format_bytes(needed(profile))} before the first activation; the "
        f"budget is {format_bytes(plan.budget_bytes)}."
    )


def bounds(plan: Plan) -> str:
    """Return a sentence about what is the least that an iteration can take."""
    promise = plan.predicted
    return (
        f"No plan of this kind can take less than {format_seconds(promise.lower_bound_s)} within this budget; "
        f"a device that holds everything would need {format_seconds(promise.no_offload_s)}."
    )


def _lead(plan: Plan, profile: Profile) -> str:
    basis = "estimated from the hardware's description" if plan.estimated else "by simulation of measured blocks"
    time = f"One iteration should take {format_seconds(plan.predicted.iteration_s)}, {basis}."
    return f"{size_and_budget(plan, profile)} {time} {bounds(plan)}"


def _figures(plan: Plan, profile: Profile) -> str:
    promise = plan.predicted
    entries = [
        budget_figure(plan, profile),
        ("Device peak", format_bytes(promise.device_peak_bytes), "predicted"),
        ("Iteration", format_seconds(promise.iteration_s), "predicted"),
        *bound_figures(plan, promise.iteration_s),
        *_rate(plan),
        ("Host peak", format_bytes(promise.host_peak_bytes), f"of {format_bytes(plan.host_budget_bytes)} allowed"),
    ]
    return figures(entries)


def _rate(plan: Plan) -> Iterator[tuple[str, str, str]]:
    if plan.tokens_per_s:
        yield "Tokens per second", format_rate(plan.tokens_per_s), "padding included"
    if plan.peak_share is not None:
        peak = f"of the specified {plan.peak_flops_per_s / 1e12:.3g} TFLOP/s"
        yield "Model FLOPs use", f"{plan.peak_share:.0%}", peak


def budget_figure(plan: Plan, profile: Profile) -> tuple[str, str, str]:
    """Return the budget, and how much that is of what there is."""
    share = plan.budget_bytes / needed(profile)
    size = f"{share:.0%} of" if share < 1 else f"{share:.1f} times"
    return "Budget", format_bytes(plan.budget_bytes), f"{size} weights, gradients and state"


def bound_figures(plan: Plan, step_s: float) -> list[tuple[str, str, str]]:
    """Return what the plan lost against the best plan, and ``step_s`` against a device with enough memory."""
    promise = plan.predicted
    gap = f"{promise.gap:.1%}" if promise.proved else "not proved"
    least = "to the lower bound of" if promise.proved else "as time was up; computations alone take"
    found = [("Plan's gap", gap, f"{least} {format_seconds(promise.lower_bound_s)}")]
    if promise.no_offload_s > 0:
        slower = f"{step_s / promise.no_offload_s:.2f}×"
        found.append(("Against no offload", slower, f"{format_seconds(promise.no_offload_s)} with enough memory"))
    return found


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return headline figures: name, value, and what is to be known about it."""
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in entries)
    return f'<dl class="figures">{cells}</dl>'


def times(plan: Plan, measured: Sequence[tuple[str, float]] = ()) -> str:
    """Return the times of an iteration side by side; ``measured`` come last, and the last of them stands out."""
    promise = plan.predicted
    rows = [
        ("no offload", promise.no_offload_s),
        ("lower bound", promise.lower_bound_s),
        ("predicted", promise.iteration_s),
        *measured,
    ]
    return bar_list([(name, seconds, format_seconds(seconds)) for name, seconds in rows], chosen=len(rows) - 1)


def _iterations(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None) -> str:
    names = tables.block_names(profile)
    lengths = [trace.iteration_time for trace in (predicted, measured) if trace]
    common = max(lengths) <= _COMMON_AXIS * min(lengths)
    shown = []
    for name, trace in (("Predicted", predicted), ("Measured", measured)):
        if trace:
            length = max(lengths) if common else trace.iteration_time
            waits = max(0.0, trace.iteration_time - trace.busy("compute"))
            caption = (
                f"{name} {format_seconds(trace.iteration_time)} "
                # Sums of floats: less than a microsecond is no wait.
                f"<small>compute {f'waits {format_seconds(waits)}' if waits > 1e-6 else 'never waits'}</small>"
            )
            shown.append(timeline.iteration(trace, plan, names, length, caption=caption))
    scale = " Both are drawn to the same scale." if measured and common else ""
    scale = " The two have different time scales." if measured and not common else scale
    drawn = [bar for trace in (predicted, measured) if trace for bar in timeline.bars(trace, plan)]
    return section(
        "One iteration",
        "What each part of the machine does; point at a bar for block, size and time, drag to see a part of it, click "
        "twice to see all. Shades alternate from block to block; iterations repeat, so work that runs into the next "
        f"one is seen at the beginning.{scale}",
        timeline.legend(drawn),
        *shown,
    )


def _batch(plan: Plan) -> str:
    """Return the throughput against the batch size, if that was chosen with the plan."""
    curve = plan.batch_curve
    if not curve:
        return ""
    chosen = next(i for i, point in enumerate(curve) if point.batch_size == plan.batch_size)
    sizes = [float(point.batch_size) for point in curve]
    throughput = lines(
        "Samples per second",
        [
            Line(
                name="relaxed program",
                xs=sizes,
                ys=[point.relaxed_samples_per_s for point in curve],
                color="var(--faint)",
                dash="dash",
            ),
            Line(name="plan", xs=sizes, ys=[point.samples_per_s for point in curve], points=True),
        ],
        x_title="batch size",
        x_ticks=[(size, f"{size:g}") for size in sizes],
        log_x=True,
    )
    rows = [
        [
            str(point.batch_size),
            NONE if point.samples_per_s is None else f"{point.samples_per_s:.3g}",
            NONE if point.iteration_s is None else format_seconds(point.iteration_s),
            NONE if point.device_peak_bytes is None else format_bytes(point.device_peak_bytes),
            escape(point.reason),
        ]
        for point in curve
    ]
    head = ("batch size", "samples/s", "iteration", "device peak", "outcome")
    return section(
        "Batch size",
        f"Chosen with the plan: {plan.batch_size}. Sizes without a point were judged by the relaxed program alone.",
        throughput,
        table(head, rows, numeric=(1, 2, 3), marked=chosen, label="Batch sizes"),
    )
