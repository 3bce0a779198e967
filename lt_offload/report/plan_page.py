"""The page of a plan, and the sections about a plan in the page of a run.

It needs no trainer, so that a plan can be drawn on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lt_offload.plan.what_if import Gain
from lt_offload.report import timeline
from lt_offload.report.page import drawn, section, table, write_page
from lt_offload.schema.explain import brief, samples_of
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_seconds


def write_plan_report(
    path: str | Path, plan: Plan, profile: Profile, predicted: Trace, gains: Sequence[Gain] = ()
) -> Path:
    """Write the page of a plan to ``path`` and return the path; ``gains`` are what more of each lane would buy."""
    parts = [f"<p>{escape(paragraph(plan, profile))}</p>", *sections(plan, profile, {"Predicted": predicted}, gains)]
    return write_page(Path(path), title(plan.model, plan), f"plan · {task(plan, profile)}", parts)


def title(model: str, plan: Plan) -> str:
    """Return the model and the budget."""
    return f"{model} in {format_bytes(plan.budget_bytes)}"


def task(plan: Plan, profile: Profile) -> str:
    """Return batch, dtype, optimizer and hardware of the plan in a few words."""
    return ", ".join((samples_of(plan, "×"), profile.dtype, profile.optimizer.name, profile.hardware.name))


def paragraph(plan: Plan, profile: Profile) -> str:
    """Return the size of the model, and what the plan makes of it; the batch sizes are among its decisions."""
    needed = sum(t.bytes * (2 if t.trainable else 1) + t.state_bytes for t in profile.tensors)
    size = f"Weights, gradients and optimizer state take {format_bytes(needed)} before the first activation."
    return f"{size} {brief(plan).partition(chr(10) * 2)[0]}"


def sections(plan: Plan, profile: Profile, traces: dict[str, Trace], gains: Sequence[Gain]) -> list[str]:
    """Return the sections about a plan below its headline figures; ``traces`` are iterations by their titles."""
    label = "; ".join(
        f"{name} iteration of {format_seconds(trace.iteration_time)}, {timeline.memory_title(trace)}"
        for name, trace in traces.items()
    )
    explained = f'<pre class="scroll" tabindex="0">{escape(plan.explain())}</pre>'
    return [
        section(
            "One iteration",
            "What each part of the machine does; point at a bar for its block and time, drag to see a part of it, "
            "click twice to see all. Iterations repeat: work right of the last line runs beside the next one.",
            drawn(timeline.iteration(traces), "iteration", label),
        ),
        _gains(plan, gains),
        section("Decisions", "As lt-finetune plan --explain tells them, block by block.", explained),
        section("Machine", "", table((), _machine(plan, profile))),
    ]


def _gains(plan: Plan, gains: Sequence[Gain]) -> str:
    """Return the table of ``gains``; empty without any."""
    now = plan.predicted
    rows = [
        (
            gain.change,
            format_seconds(gain.iteration_s),
            f"{gain.iteration_s / now.iteration_s - 1:+z.1%}",
            format_seconds(gain.lower_bound_s),
            gain.note,
        )
        for gain in gains
    ]
    as_planned = ("as planned", format_seconds(now.iteration_s), "", format_seconds(now.lower_bound_s), "")
    head = ("change", "iteration", "time", "lower bound", "why")
    note = "Planned again for a machine that differs in one thing only."
    return section("What more would buy", note, table(head, [as_planned, *rows]) if rows else "")


def _machine(plan: Plan, profile: Profile) -> Iterator[tuple[str, str]]:
    hardware, optimizer = profile.hardware, profile.optimizer
    yield "machine", hardware.name
    yield "source of its figures", hardware.source or "not given"
    yield "times of blocks", "estimated" if profile.estimated else "measured"
    yield "host to device", f"{format_bytes(hardware.h2d_bytes_per_s)}/s"
    yield "device to host", f"{format_bytes(hardware.d2h_bytes_per_s)}/s"
    native = ", by the native AdamW" if optimizer.host_kernel else ""
    yield "update on the host", f"{format_bytes(optimizer.host_bytes_per_s)}/s{native}"
    yield "update on the device", f"{format_bytes(optimizer.device_bytes_per_s)}/s"
    yield "model structure", plan.fingerprint
