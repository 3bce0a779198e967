"""A plan as text for people. Knows the plan only, so that a saved one can be explained without its profile."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lt_offload.plan.schedule import Alternative, Plan
from lt_offload.units import format_bytes, format_seconds

WIDTH = 100
_LABEL = 16
_MOST_ALTERNATIVES = 6
_LANES = {"compute": "compute", "h2d": "copies to device", "d2h": "copies to host", "host": "updates on host"}
_MEANINGS = {
    "keep": "activations stay on the device between forward and backward",
    "recompute": "only the block's input is kept; the backward runs the forward again",
    "offload": "activations wait on the host between forward and backward",
    "mixed": "results of costly operations wait on the host, cheap ones are computed again",
    "host": "the gradient is sent to the host, which updates the weight there",
    "paged": "updated on the device, with optimizer states that are fetched for it and sent back",
    "device": "updated on the device, where the optimizer states stay",
    "none": "frozen",
    "in, out": "bytes per block and iteration that are copied to the device and to the host; - if nothing is",
}
_HEADERS = ("blocks", "activations", "weights in", "states in", "gradients out", "tensors updated on")


def explain(plan: Plan) -> str:
    """Return what ``plan`` does with each block, what it costs, and why it was chosen, in at most 100 columns."""
    rows = [_HEADERS, *(_row(list(run)) for _, run in groupby(_blocks(plan), key=_kind))]
    lines = [
        *_fields([("model", _inputs(plan)), *_prediction(plan), *_memory(plan), *_traffic(plan)]),
        "",
        *_table(rows),
        "",
        *_fields(_legend(plan)),
    ]
    if plan.notes:
        lines += ["", *_fields([("note", note) for note in plan.notes])]
    if plan.alternatives:
        lines += ["", "Not chosen:", *_fields(_alternative(a) for a in plan.alternatives[:_MOST_ALTERNATIVES])]
    return "\n".join(lines) + "\n"


# -- totals ----------------------------------------------------------------------------------------------------------


def _inputs(plan: Plan) -> str:
    tokens = f"batch {plan.batch_size} x {plan.sequence_length} tokens"
    estimated = "; the profile was estimated, not measured" if plan.estimated else ""
    return f"{plan.model}, {len(plan.options)} blocks, {tokens}, planner {plan.planner}{estimated}"


def _prediction(plan: Plan) -> Iterator[tuple[str, str]]:
    found = plan.predicted
    if not found.iteration_s:
        yield "iteration", "not simulated"
        return
    slower = found.iteration_s / found.no_offload_s if found.no_offload_s else 1.0
    about = "about " if plan.estimated else ""
    yield (
        "iteration",
        f"{about}{format_seconds(found.iteration_s)}, {found.gap:.1%} above the lower bound of "
        f"{format_seconds(found.lower_bound_s)}; {slower:.2f} times the {format_seconds(found.no_offload_s)} "
        "of a device with enough memory",
    )


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    found = plan.predicted
    rest = max(found.device_peak_bytes - plan.arena_bytes, 0)
    yield (
        "device memory",
        f"{format_bytes(found.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}: "
        f"{format_bytes(plan.arena_bytes)} for weights and optimizer states, up to {format_bytes(rest)} for all else",
    )
    yield "host memory", f"{format_bytes(found.host_peak_bytes)} of {format_bytes(plan.host_budget_bytes)}"


def _traffic(plan: Plan) -> Iterator[tuple[str, str]]:
    moved: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for op in plan.ops:
        moved[op.resource] += op.bytes
        busy[op.resource] += op.seconds
    to_device, to_host = format_bytes(moved["h2d"]), format_bytes(moved["d2h"])
    yield "copies", f"{to_device} to the device, {to_host} to the host per iteration"
    if plan.predicted.iteration_s:
        parts = [f"{name} {busy[lane] / plan.predicted.iteration_s:.0%}" for lane, name in _LANES.items() if busy[lane]]
        yield "busy", ", ".join(parts)


def _alternative(found: Alternative) -> tuple[str, str]:
    seconds = "no plan" if found.iteration_s is None else format_seconds(found.iteration_s)
    return seconds, f"{found.planner}: {found.reason}"


# -- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    index: int
    option: str
    moved: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes per (kind, payload)."""
    places: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Tensors per update place."""


def _blocks(plan: Plan) -> list[_Block]:
    blocks = [_Block(index, option) for index, option in enumerate(plan.options)]
    for op in plan.ops:
        if op.payload is not None:
            blocks[op.block].moved[op.kind, op.payload] += op.bytes
        if op.kind == "update":
            for tensor in op.tensors:
                blocks[op.block].places[plan.update_places[tensor]] += 1
    return blocks


def _kind(block: _Block) -> tuple[object, ...]:
    """Blocks in a row with equal kinds share a line."""
    fetched = tuple(bool(block.moved["prefetch", payload]) for payload in ("weight", "state"))
    return block.option, fetched, tuple(sorted(block.places))


def _row(run: Sequence[_Block]) -> tuple[str, ...]:
    first, last = run[0].index, run[-1].index
    copied = _sizes(block.moved["offload", "activation"] for block in run)
    places = {place: [block.places[place] for block in run] for place in _MEANINGS if place in run[0].places}
    return (
        str(first) if first == last else f"{first}-{last}",
        run[0].option if copied == "-" else f"{run[0].option} {copied}",
        _sizes(block.moved["prefetch", "weight"] for block in run),
        _sizes(block.moved["prefetch", "state"] for block in run),
        _sizes(block.moved["offload", "grad"] for block in run),
        ", ".join(f"{place} {_range(counts)}" for place, counts in places.items()) or "none",
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


def _sizes(sizes: Iterable[int]) -> str:
    found = list(sizes)
    low, high = format_bytes(min(found)), format_bytes(max(found))
    if not max(found):
        return "-"
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    return f"{number}-{high}" if high.endswith(unit) and min(found) else f"{low if min(found) else 0}-{high}"


# -- layout ----------------------------------------------------------------------------------------------------------


def _legend(plan: Plan) -> list[tuple[str, str]]:
    used = {*plan.options, *plan.update_places, "in, out"}
    return [(word, meaning) for word, meaning in _MEANINGS.items() if word in used]


def _fields(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield lines of a label and a text that is wrapped to the right of it."""
    for label, text in pairs:
        lines = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False) or [""]
        for at, line in enumerate(lines):
            yield f"{label if at == 0 else '':<{_LABEL}}{line}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    indent = sum(width + 2 for width in widths[:-1])
    for at, row in enumerate(rows):
        # Only the last column may need more than a line.
        first, *rest = textwrap.wrap(row[-1], max(WIDTH - indent, len(_HEADERS[-1]))) or [""]
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, first]).rstrip()
        yield from (" " * indent + line for line in rest)
        if at == 0:
            yield "-" * min(WIDTH, indent + widths[-1])
