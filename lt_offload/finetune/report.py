"""The report of a run: one self-contained HTML page that shows the plan, what was predicted and what happened.

Knows plans, profiles and traces; not trainers and not torch, so that a plan can be reported on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from lt_offload.finetune import _drawing as drawing
from lt_offload.plan.perfetto import LANES
from lt_offload.plan.schedule import Payload, Plan, Resource, UpdatePlace
from lt_offload.plan.trace import Trace
from lt_offload.profile.types import Profile
from lt_offload.units import format_bytes, format_seconds

_COMMON_AXIS = 3.0
"""Two iterations share one time scale unless one is so many times longer than the other."""
_PLACED = ("loss_before", "loss_after", "sample", "step_s", "device_peak_bytes", "host_peak_bytes")
"""Keys of the summary that have places of their own."""
_PAYLOADS: dict[Payload, str] = {
    "weight": "weights",
    "grad": "gradients",
    "state": "optimizer state",
    "activation": "activations",
}
_SCRIPT = """for (const figure of document.querySelectorAll("figure"))
  for (const event of ["pointerover", "click"])
    figure.addEventListener(event, ({target}) => {
      const title = target.tagName === "rect" && target.firstElementChild;
      if (title) figure.querySelector(".readout").textContent = title.textContent;
    });"""
"""Shows a bar's title below its drawing, for fingers; without scripts the browser's own tooltip remains."""
_PLACES: dict[UpdatePlace, str] = {
    "device": "device",
    "paged": "device, state fetched",
    "host": "host",
    "none": "nowhere",
}


def write_report(
    run_dir: str | Path,
    *,
    plan: Plan,
    profile: Profile,
    predicted: Trace,
    measured: Trace | None,
    summary: Mapping[str, object],
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
    """
    return _write(Path(run_dir) / "report.html", _page(plan, profile, predicted, measured, summary))


def write_plan_report(path: str | Path, plan: Plan, profile: Profile, predicted: Trace) -> Path:
    """Write the report of a plan that has not run to ``path`` and return the path."""
    return _write(Path(path), _page(plan, profile, predicted, None, {}))


def _write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _page(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None, summary: Mapping[str, object]) -> str:
    title = f"{plan.model} in {format_bytes(plan.budget_bytes)}"
    style = files("lt_offload.finetune").joinpath("report.css").read_text(encoding="utf-8")
    outcome = _outcome(plan, measured, summary)
    kind = "training report" if measured else "plan"
    tokens = f"{plan.batch_size} × {plan.sequence_length} tokens"
    about = ", ".join((tokens, profile.dtype, profile.optimizer.name, profile.hardware.name))
    body = [
        f"<header><h1>{escape(title)}</h1><p>{kind} · {escape(about)}</p></header>",
        f'<p class="lead">{_lead(plan, profile, outcome)}</p>',
        _figures(plan, profile, outcome, summary),
        _times(plan, outcome),
        _iterations(plan, profile, predicted, measured),
        _decisions(plan, profile),
        _traffic(plan, profile, predicted, measured),
        _alternatives(plan, predicted.iteration_time),
        _settings(plan, profile, summary),
        _sample(summary),
        "<footer>Made by lt_offload. The same data is in plan.json, profile.json and trace.json; "
        "trace.perfetto.json opens in ui.perfetto.dev and chrome://tracing.</footer>"
        if measured
        else "<footer>Made by lt_offload.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


# -- figures ---------------------------------------------------------------------------------------------------------


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
    peak = format_bytes(promise.device_peak_bytes) if outcome.measured else ""
    step = format_seconds(promise.iteration_s) if outcome.measured else ""
    entries = [
        ("Budget", format_bytes(plan.budget_bytes), f"{share:.0%} of weights, gradients and state"),
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
    longest = max(seconds for _, seconds in rows) or 1.0
    cells = "".join(
        f'<dt>{name}</dt><dd{_chosen(name)}><i style="width:{78 * seconds / longest:.2f}%"></i>'
        f"<span>{format_seconds(seconds)}</span></dd>"
        for name, seconds in rows
    )
    return f'<dl class="times">{cells}</dl>'


def _chosen(name: str) -> str:
    return ' class="chosen"' if name in ("predicted", "measured") else ""


def _iterations(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None) -> str:
    names = _block_names(profile)
    lengths = [trace.iteration_time for trace in (predicted, measured) if trace]
    common = max(lengths) <= _COMMON_AXIS * min(lengths)
    shown = []
    for name, trace in (("Predicted", predicted), ("Measured", measured)):
        if trace:
            axis = max(lengths) if common else trace.iteration_time
            waits = max(0.0, trace.iteration_time - trace.busy("compute"))
            shown.append(
                f'<figure data-source="{trace.source}"><figcaption>{name} {format_seconds(trace.iteration_time)} '
                f"<small>compute waits {format_seconds(waits)}</small></figcaption>"
                f'{drawing.iteration(trace, plan, names, axis)}<p class="readout"></p></figure>'
            )
    scale = " Both are drawn to the same scale." if measured and common else ""
    scale = " The two have different time scales." if measured and not common else scale
    bars = [bar for trace in (predicted, measured) if trace for bar in drawing.bars(trace, plan)]
    return (
        f'<h2>One iteration</h2><p class="note">What each part of the machine does; hover for block, size and time. '
        f"Shades alternate from block to block; iterations repeat, so work that runs into the next one is seen at the "
        f"beginning.{scale}</p>{drawing.legend(bars)}{''.join(shown)}"
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """Return a table of cells that are HTML already; ``numeric`` are the columns set flush right."""
    right = set(numeric)

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="n"' if column in right else "" for column in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{m}>{cell}</{tag}>" for m, cell in zip(marks, cells, strict=True)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _decisions(plan: Plan, profile: Profile) -> str:
    fetched: dict[int, int] = {}
    for op in plan.ops:
        if op.kind == "prefetch" and op.payload == "weight":
            for tensor in op.tensors:
                fetched[tensor] = fetched.get(tensor, 0) + profile.tensors[tensor].bytes
    described = [(block, _decision(block, plan, profile, fetched)) for block in range(len(profile.blocks))]
    names = _block_names(profile)
    rows = []
    for cells, run in groupby(described, key=lambda item: item[1]):
        members = [names[block] for block, _ in run]
        rows.append([_range(members), *cells])
    head = ("block", "weights", "stay on device", "fetched per iteration", "activations", "updated on")
    return (
        '<h2>Decisions</h2><p class="note">Neighbouring blocks that are treated alike share a row; '
        "sizes are per block.</p>" + _table(head, rows, numeric=(1, 3))
    )


def _decision(block: int, plan: Plan, profile: Profile, fetched: Mapping[int, int]) -> tuple[str, ...]:
    mine = [i for i, tensor in enumerate(profile.tensors) if block in tensor.blocks]
    size = sum(profile.tensors[i].bytes for i in mine)
    stay = sum(profile.tensors[i].bytes for i in mine if i not in fetched) / size if size else 1.0
    moved = sum(fetched.get(i, 0) for i in mine)
    tied = " (tied)" if any(len(profile.tensors[i].blocks) > 1 for i in mine) else ""
    option = profile.blocks[block].option(plan.options[block])
    places: dict[UpdatePlace, int] = {}
    for i in mine:
        if profile.tensors[i].trainable:
            place = plan.update_places[i]
            places[place] = places.get(place, 0) + profile.tensors[i].bytes
    return (
        f"{format_bytes(size)}{tied}",
        f'<span class="share"><i style="width:{stay:.0%}"></i></span>{stay:.0%}',
        format_bytes(moved) if moved else "–",
        option.name + (f", {format_bytes(option.offload_bytes)} to host" if option.offload_bytes else ""),
        _shares(places) or "frozen",
    )


def _shares(places: Mapping[UpdatePlace, int]) -> str:
    total = sum(places.values())
    ordered = sorted(places.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return _PLACES[ordered[0][0]]
    return ", ".join(f"{_PLACES[place]} {size / total:.0%}" for place, size in ordered)


def _block_names(profile: Profile) -> list[str]:
    """Return the names of the blocks without the dotted prefix that all of them share."""
    paths = [block.name.split(".") for block in profile.blocks]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return [".".join(path[shared:]) for path in paths]


def _range(names: Sequence[str]) -> str:
    if len(names) == 1:
        return escape(names[0])
    return f"{escape(names[0])} – {escape(names[-1].rpartition('.')[2])} <small>{len(names)} blocks</small>"


def _traffic(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None) -> str:
    rows = []
    for lane in LANES:
        on_lane = [op for op in plan.ops if op.resource == lane]
        sizes = [sum(op.bytes for op in on_lane if op.payload == payload) for payload in _PAYLOADS]
        updated = [t for op in on_lane for t in op.tensors] if lane == "host" else []
        sizes.append(sum(sizes) + sum(profile.tensors[t].bytes for t in updated))
        busy = [_busy(trace, lane) for trace in (predicted, measured) if trace]
        rows.append([LANES[lane], *(format_bytes(size) if size else "–" for size in sizes), *busy])
    head = ["", *_PAYLOADS.values(), "together", "busy, predicted", *(["busy, measured"] if measured else [])]
    return (
        '<h2>Traffic and load</h2><p class="note">Bytes per iteration, and the share of the iteration during which '
        "each part works; the row of the host update counts the weights it updates.</p>"
        + _table(head, rows, numeric=range(1, len(head)))
    )


def _busy(trace: Trace, lane: Resource) -> str:
    seconds = trace.busy(lane)
    share = f" <small>{seconds / trace.iteration_time:.0%}</small>" if trace.iteration_time > 0 else ""
    return format_seconds(seconds) + share


def _alternatives(plan: Plan, chosen_s: float) -> str:
    if not plan.alternatives:
        return ""
    rows = [[escape(plan.planner), format_seconds(chosen_s), "chosen"]]
    rows += [
        [escape(a.planner), format_seconds(a.iteration_s) if a.iteration_s is not None else "–", escape(a.reason)]
        for a in dict.fromkeys(plan.alternatives)
    ]
    return '<h2>Runners-up</h2><p class="note">Candidates that were generated and simulated.</p>' + _table(
        ("planner", "iteration", ""), rows, numeric=(1,)
    )


# -- settings --------------------------------------------------------------------------------------------------------


def _settings(plan: Plan, profile: Profile, summary: Mapping[str, object]) -> str:
    hardware, optimizer = profile.hardware, profile.optimizer
    pairs: list[tuple[str, object]] = [
        ("planner", plan.planner),
        ("device budget", format_bytes(plan.budget_bytes)),
        ("host budget", format_bytes(plan.host_budget_bytes)),
        ("batch", f"{plan.batch_size} × {plan.sequence_length} tokens"),
        ("arena for weights and states", format_bytes(plan.arena_bytes)),
        ("optimizer", optimizer.name),
        ("update on the host", f"{format_bytes(optimizer.host_bytes_per_s)}/s"),
        ("update on the device", f"{format_bytes(optimizer.device_bytes_per_s)}/s"),
        ("host to device", f"{format_bytes(hardware.h2d_bytes_per_s)}/s"),
        ("device to host", f"{format_bytes(hardware.d2h_bytes_per_s)}/s"),
        ("machine", hardware.name),
        ("times", "estimated" if profile.estimated else "measured"),
        ("model structure", plan.fingerprint),
    ]
    pairs += [(key.replace("_", " "), value) for key, value in summary.items() if key not in _PLACED]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd></div>" for name, value in pairs)
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return f'<h2>Settings</h2><dl class="pairs">{cells}</dl>' + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _sample(summary: Mapping[str, object]) -> str:
    sample = summary.get("sample")
    return f"<h2>Sample</h2><blockquote>{escape(str(sample))}</blockquote>" if sample else ""
