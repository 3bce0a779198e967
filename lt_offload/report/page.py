"""The report of a run, of a plan or of a sweep: one self-contained HTML page.

It needs no trainer, so that a plan can be reported on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from lt_offload.plan.sweep import Sweep, SweepPoint, format_rate, headline, name_of
from lt_offload.plan.what_if import Gain
from lt_offload.report import charts, tables
from lt_offload.report.charts import Line, bar_list, chart
from lt_offload.report.tables import NONE, section, table
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_seconds

_COMMON_AXIS = 3.0
"""Two iterations share one time scale unless one is so many times longer than the other."""
_TITLES = {"memory": "how much GPU memory?", "host_memory": "how much RAM?", "hardware": "which card?"}
_OF = {"memory": "GPU memory", "host_memory": "RAM allowed", "hardware": "machine"}
_SCRIPT = """for (const figure of document.querySelectorAll("figure"))
  for (const event of ["pointerover", "click"])
    figure.addEventListener(event, ({target}) => {
      const title = target.tagName === "rect" && target.firstElementChild;
      if (title) figure.querySelector(".readout").textContent = title.textContent;
    });"""
"""Shows a bar's title below its drawing, for fingers; without scripts the browser's own tooltip remains."""


def write_report(
    run_dir: str | Path,
    *,
    plan: Plan,
    profile: Profile,
    predicted: Trace,
    measured: Trace | None,
    summary: Mapping[str, object],
    gains: Sequence[Gain] = (),
) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Args:
        run_dir: the run folder; it is made if it does not exist.
        plan: the plan that ran.
        profile: what it was made for.
        predicted: the simulated iteration.
        measured: the recorded iteration, if there is one.
        summary: ``loss_before``, ``loss_after`` and ``sample`` (generated text) have their own places; ``step_s``,
            ``device_peak_bytes`` and ``host_peak_bytes`` are figures of the whole run, where ``measured`` has those of
            one iteration. Everything else is listed under the settings, in the given order.
        gains: what more of each lane would buy.
    """
    return _write(Path(run_dir) / "report.html", _plan_page(plan, profile, predicted, measured, summary, gains))


def write_plan_report(
    path: str | Path, plan: Plan, profile: Profile, predicted: Trace, gains: Sequence[Gain] = ()
) -> Path:
    """Write the report of a plan that has not run to ``path`` and return the path; ``gains`` as for a run."""
    return _write(Path(path), _plan_page(plan, profile, predicted, None, {}, gains))


def write_sweep_report(path: str | Path, sweep: Sweep) -> Path:
    """Write the curves and the table of a sweep to ``path`` and return the path."""
    return _write(Path(path), _sweep_page(sweep))


def _write(path: Path, html: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def _plan_page(
    plan: Plan,
    profile: Profile,
    predicted: Trace,
    measured: Trace | None,
    summary: Mapping[str, object],
    gains: Sequence[Gain],
) -> str:
    title = f"{plan.model} in {format_bytes(plan.budget_bytes)}"
    outcome = _outcome(plan, measured, summary)
    kind = "training report" if measured else "plan"
    tokens = f"{plan.batch_size} × {plan.sequence_length} tokens"
    about = ", ".join((tokens, profile.dtype, profile.optimizer.name, profile.hardware.name))
    return _html(
        title,
        [
            f"<header><h1>{escape(title)}</h1><p>{kind} · {escape(about)}</p></header>",
            f'<p class="lead">{_unbroken(_lead(plan, profile, outcome))}</p>',
            _figures(plan, profile, outcome, summary),
            _times(plan, outcome),
            _iterations(plan, profile, predicted, measured),
            tables.gains(plan, gains),
            _batch(plan),
            tables.decisions(plan, profile),
            tables.traffic(plan, profile, predicted, measured),
            tables.alternatives(plan, predicted.iteration_time),
            tables.settings(plan, profile, summary),
            _sample(summary),
            "<footer>Made by lt_offload. The same data is in plan.json, profile.json and trace.json; "
            "trace.perfetto.json opens in ui.perfetto.dev and chrome://tracing.</footer>"
            if measured
            else "<footer>Made by lt_offload.</footer>",
        ],
    )


def _html(title: str, body: Iterable[str]) -> str:
    """Return a page that needs nothing from outside. ``title`` is text, ``body`` is HTML."""
    style = files("lt_offload.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _unbroken(text: str) -> str:
    """Return ``text`` with numbers that stay on one line with their units."""
    return re.sub(r"(\d) ([kMGT]?B|min|[mu]?s)\b", "\\1\N{NO-BREAK SPACE}\\2", text)


# -- the page of a run or a plan ------------------------------------------------------------------------------------


def _needed(profile: Profile) -> int:
    """Return the bytes of weights, gradients and optimizer state."""
    return sum(t.bytes * (2 if t.trainable else 1) + t.state_bytes for t in profile.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """Headline figures: of the run, or else of the plan."""

    measured: bool
    step_s: float
    device_peak: float
    host_peak: float


def _outcome(plan: Plan, measured: Trace | None, summary: Mapping[str, object]) -> _Outcome:
    promise = plan.predicted
    if measured is None:
        return _Outcome(
            measured=False,
            step_s=promise.iteration_s,
            device_peak=promise.device_peak_bytes,
            host_peak=promise.host_peak_bytes,
        )

    def figure(key: str, otherwise: float) -> float:
        value = summary.get(key)
        return float(value) if isinstance(value, int | float) and value > 0 else otherwise

    return _Outcome(
        measured=True,
        step_s=figure("step_s", measured.iteration_time),
        device_peak=figure("device_peak_bytes", measured.device_peak),
        host_peak=figure("host_peak_bytes", measured.host_peak),
    )


def _lead(plan: Plan, profile: Profile, outcome: _Outcome) -> str:
    promise = plan.predicted
    needed, budget = format_bytes(_needed(profile)), format_bytes(plan.budget_bytes)
    size = f"Weights, gradients and optimizer state take {needed} before the first activation; the budget is {budget}."
    if outcome.measured:
        ratio = f"{outcome.step_s / promise.iteration_s:.2f} times the planned {format_seconds(promise.iteration_s)}"
        time = f"One iteration took {format_seconds(outcome.step_s)}, {ratio}."
    else:
        basis = "estimated from the hardware's description" if plan.estimated else "by simulation of measured blocks"
        time = f"One iteration should take {format_seconds(promise.iteration_s)}, {basis}."
    bound = (
        f"No plan of this kind can take less than {format_seconds(promise.lower_bound_s)} within this budget; "
        f"a device that holds everything would need {format_seconds(promise.no_offload_s)}."
    )
    return f"{size} {time} {bound}"


def _figures(plan: Plan, profile: Profile, outcome: _Outcome, summary: Mapping[str, object]) -> str:
    promise = plan.predicted
    share = plan.budget_bytes / _needed(profile)
    size = f"{share:.0%} of" if share < 1 else f"{share:.1f} times"
    peak = format_bytes(promise.device_peak_bytes) if outcome.measured else ""
    step = format_seconds(promise.iteration_s) if outcome.measured else ""
    entries = [
        ("Budget", format_bytes(plan.budget_bytes), f"{size} weights, gradients and state"),
        ("Device peak", format_bytes(outcome.device_peak), f"predicted {peak}"),
        ("Step time", format_seconds(outcome.step_s), f"predicted {step}"),
        ("Plan's gap", f"{promise.gap:.1%}", f"to the lower bound of {format_seconds(promise.lower_bound_s)}"),
    ]
    if promise.no_offload_s > 0:
        slower = f"{outcome.step_s / promise.no_offload_s:.2f}×"
        entries.append(("Against no offload", slower, f"{format_seconds(promise.no_offload_s)} with enough memory"))
    entries.append(("Host peak", format_bytes(outcome.host_peak), f"of {format_bytes(plan.host_budget_bytes)} allowed"))
    before, after = summary.get("loss_before"), summary.get("loss_after")
    if isinstance(before, int | float) and isinstance(after, int | float):
        entries.append(("Held-out loss", f"{after:.3f}", f"{before:.3f} before training"))
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in entries)
    return f'<dl class="figures">{cells}</dl>'


def _times(plan: Plan, outcome: _Outcome) -> str:
    promise = plan.predicted
    rows = [
        ("no offload", promise.no_offload_s),
        ("lower bound", promise.lower_bound_s),
        ("predicted", promise.iteration_s),
    ]
    if outcome.measured:
        rows.append(("measured", outcome.step_s))
    return bar_list([(name, seconds, format_seconds(seconds)) for name, seconds in rows], chosen=len(rows) - 1)


def _iterations(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None) -> str:
    names = tables.block_names(profile)
    lengths = [trace.iteration_time for trace in (predicted, measured) if trace]
    common = max(lengths) <= _COMMON_AXIS * min(lengths)
    shown = []
    for name, trace in (("Predicted", predicted), ("Measured", measured)):
        if trace:
            axis = max(lengths) if common else trace.iteration_time
            waits = max(0.0, trace.iteration_time - trace.busy("compute"))
            shown.append(
                f'<figure data-source="{trace.source}"><figcaption>{name} {format_seconds(trace.iteration_time)} '
                f"<small>compute {f'waits {format_seconds(waits)}' if waits > 1e-6 else 'never waits'}</small>"
                "</figcaption>"
                f'{charts.iteration(trace, plan, names, axis)}<p class="readout"></p></figure>'
            )
    scale = " Both are drawn to the same scale." if measured and common else ""
    scale = " The two have different time scales." if measured and not common else scale
    drawn = [bar for trace in (predicted, measured) if trace for bar in charts.bars(trace, plan)]
    return section(
        "One iteration",
        "What each part of the machine does; point at a bar for block, size and time. Shades alternate from block to "
        f"block; iterations repeat, so work that runs into the next one is seen at the beginning.{scale}",
        charts.legend(drawn),
        *shown,
    )


def _batch(plan: Plan) -> str:
    """Return the throughput against the batch size, if that was chosen with the plan."""
    curve = plan.batch_curve
    if not curve:
        return ""
    chosen = next(i for i, point in enumerate(curve) if point.batch_size == plan.batch_size)
    throughput = chart(
        "Samples per second",
        [float(point.batch_size) for point in curve],
        [
            Line(name="relaxed program", values=[point.relaxed_samples_per_s for point in curve]),
            Line(name="plan", values=[point.samples_per_s for point in curve], main=True),
        ],
        x_text=lambda x: f"{x:g}",
        y_text=lambda y: f"{y:.3g}",
        chosen=chosen,
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


def _sample(summary: Mapping[str, object]) -> str:
    sample = summary.get("sample")
    return section("Sample", "", f"<blockquote>{escape(str(sample))}</blockquote>") if sample else ""


# -- the page of a sweep --------------------------------------------------------------------------------------------


def _sweep_page(sweep: Sweep) -> str:
    """Return the page of ``sweep``."""
    title = f"{sweep.model}: {_TITLES[sweep.axis]}"
    batches = sorted({point.batch_size for point in sweep.points if point.batch_size is not None})
    machines = {point.hardware for point in sweep.points} if sweep.axis != "hardware" else set()
    batch = " or ".join(map(str, batches)) or "?"
    about = ", ".join([f"{batch} × {sweep.sequence_length} tokens", sweep.dtype, *sorted(machines)])
    return _html(
        title,
        [
            f"<header><h1>{escape(title)}</h1><p>sweep · {escape(about)}</p></header>",
            f'<p class="lead">{_unbroken(escape(headline(sweep)))} Every point is a plan, checked and simulated.</p>',
            _machines(sweep) if sweep.axis == "hardware" else _curves(sweep),
            _sweep_table(sweep),
            "<footer>Made by lt_offload.</footer>",
        ],
    )


def _curves(sweep: Sweep) -> str:
    points = sweep.points
    sizes = [float(p.memory_bytes if sweep.axis == "memory" else p.host_memory_bytes) for p in points]
    least = None
    if points[0].iteration_s is None:
        first = next((x for x, point in zip(sizes, points, strict=True) if point.iteration_s is not None), sizes[-1])
        least = float(sweep.smallest_bytes or first) if sweep.axis == "memory" else first
    large = max(sizes) >= 1e9

    def x_text(x: float) -> str:
        return f"{x / 1e9:.4g} GB" if large else format_bytes(x)

    def draw(name: str, y_text: Callable[[float], str], *lines: Line) -> str:
        return chart(name, sizes, lines, x_text=x_text, y_text=y_text, nothing_below=least)

    charts = [
        draw("Tokens per second", format_rate, Line(name="tokens", values=[p.tokens_per_s for p in points], main=True)),
        draw(
            "Time of an iteration",
            format_seconds,
            Line(name="lower bound", values=[p.lower_bound_s for p in points]),
            Line(name="iteration", values=[p.iteration_s for p in points], main=True),
        ),
        draw("RAM needed", _gb, Line(name="RAM", values=[_float(p.host_peak_bytes) for p in points], main=True)),
    ]
    note = f"Over {_OF[sweep.axis]}; hatched: no plan fits." if least else f"Over {_OF[sweep.axis]}."
    return section("Curves", note, f'<div class="charts">{"".join(charts)}</div>')


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _gb(value: float) -> str:
    return format_bytes(value) if value else "0"


def _machines(sweep: Sweep) -> str:
    rates = [point.tokens_per_s for point in sweep.points]
    best = max((rate for rate in rates if rate is not None), default=None)
    rows = [
        (p.hardware, p.tokens_per_s, p.reason if p.tokens_per_s is None else format_rate(p.tokens_per_s))
        for p in sweep.points
    ]
    return section("Tokens per second", "", bar_list(rows, chosen=None if best is None else rates.index(best)))


def _sweep_table(sweep: Sweep) -> str:
    head = (_OF[sweep.axis], "iteration", "tokens/s", "against no offload", "GPU peak", "RAM", "plan")
    return section(
        "Figures",
        "",
        table(
            head, [_sweep_row(point, sweep) for point in sweep.points], numeric=range(1, 6), label="Figures per point"
        ),
    )


def _sweep_row(point: SweepPoint, sweep: Sweep) -> list[str]:
    name = escape(name_of(point, sweep.axis))
    if point.iteration_s is None:
        return [name, *[NONE] * 5, escape(point.reason)]
    return [
        name,
        format_seconds(point.iteration_s),
        format_rate(point.tokens_per_s or 0.0),
        f"{point.iteration_s / point.no_offload_s:.2f}×" if point.no_offload_s else NONE,
        format_bytes(point.device_peak_bytes or 0),
        format_bytes(point.host_peak_bytes or 0),
        escape(point.planner or ""),
    ]
