"""A plan as text for people. It needs the plan alone, so that a saved one can be explained without its profile."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from lt_offload.schema.lanes import LANE
from lt_offload.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from lt_offload.schema.plan import Alternative, Plan, Prediction, UpdatePlace
    from lt_offload.schema.profile import Profile

WIDTH = 100
_BRIEF_WIDTH = 79
_LABEL = 16
_MOST_ALTERNATIVES = 6
_BAR = 20
_NOT_SIMULATED = "not simulated"
OTHER_BITS = "last bits are not those of plain PyTorch"
"""The words of a plan's note about gradients that are summed in another order."""
BINDS = "what binds: "
KERNELS = "kernels: "
"""The first words of a plan's note about what it waits for, and about larger updates if they are worth it."""
_MEANINGS = {
    "keep": "activations stay on the device between forward and backward",
    "recompute": "only the block's input is kept; the backward runs the forward again",
    "offload": "activations wait on the host between forward and backward",
    "mixed": "results of costly operations wait on the host, cheap ones are computed again",
    "reload": "only the block's input is kept, on the host; the backward runs the forward again",
    "discard": "nothing is kept; forwards of earlier blocks run again until its input is there",
    "fused": "projection and loss are one block: logits exist once, their logarithms a few tokens at a time",
    "chunked": "projection and loss of a few tokens at a time, so that all logits never exist",
    "again": "how often the forward runs again, before the backward",
    "direct": "bytes that computations read or write in host memory themselves, without a copy on the device",
    "host": "the gradient is sent to the host, which updates the weight there",
    "paged": "updated on the device, with optimizer states that are fetched for it and sent back",
    "device": "updated on the device, where the optimizer states stay",
    "none": "frozen",
    "in, out": "bytes per block and iteration that are copied to the device and to the host; - if nothing is",
}
_IN_SHORT = {
    "keep": "stay on the device",
    "recompute": "are computed again",
    "offload": "wait on the host",
    "mixed": "wait on the host or are computed again",
    "reload": "are computed again from an input that waits on the host",
    "discard": "are computed again from those of earlier blocks",
    "fused": "are fused with the loss",
    "chunked": "are fused with the loss, in chunks",
}
"""The fate of blocks' activations by option, as the rest of a sentence."""
_PLACES: dict[UpdatePlace, str] = {
    "device": "the device",
    "paged": "the device (paged)",
    "host": "the host",
}
_NATIVE = " by the native AdamW"
_HEADERS = ("blocks", "activations", "weights in", "states in", "gradients out", "tensors updated on")
_LIMITS = (7, 20, 17, 11, 17)
"""Characters of each column but the last, which takes the rest."""


def explain(plan: Plan) -> str:
    """Return each block's treatment, the costs and the reasons for the choice, in at most 100 columns."""
    rows = [_HEADERS, *(_row(list(run)) for _, run in groupby(_blocks(plan), key=_kind))]
    lines = [
        *_fields([("model", _inputs(plan)), *_prediction(plan), *_memory(plan), *_traffic(plan)]),
        "",
        *_table(rows),
        "",
        *_fields(_legend(plan)),
    ]
    if again := [op.seconds for op in plan.ops if op.save is not None]:
        said = f"{len(again)} forwards per iteration, {format_seconds(sum(again))}"
        lines += ["", *_fields([("run again", said)])]
    if plan.notes:
        lines += ["", *_fields([("note", note) for note in plan.notes])]
    if plan.batch_curve:
        lines += ["", "Batch sizes:", *_fields(_batch_sizes(plan))]
    if plan.alternatives:
        lines += ["", "Not chosen:", *_fields(_alternative(a) for a in plan.alternatives[:_MOST_ALTERNATIVES])]
    return "\n".join(lines) + "\n"


def headline(plan: Plan) -> str:
    """Return one line about ``plan``."""
    promise = plan.predicted
    near = f"{promise.gap:.1%} above the bound" if promise.proved else "how near to the best is not proved"
    return (
        f"plan by {plan.planner}: {format_seconds(promise.iteration_s)} per {plan.unit} predicted "
        f"({near}), {format_bytes(promise.device_peak_bytes)} of "
        f"{format_bytes(plan.budget_bytes)} on the device, {format_bytes(promise.host_peak_bytes)} on the host"
    )


def brief(plan: Plan) -> str:
    """Return one short paragraph about ``plan``, in less than 80 columns: time, memory, copies, updates."""
    predicted = plan.predicted
    counts = Counter(plan.update_places)
    by = {"host": _NATIVE * plan.host_kernel}
    updates = [f"{counts[place]} on {where}{by.get(place, '')}" for place, where in _PLACES.items() if counts[place]]
    options = Counter(_IN_SHORT.get(option, option) for option in plan.options).most_common()
    activations = "; ".join(f"of {count} {'block' if count == 1 else 'blocks'} {what}" for what, count in options)
    text = (
        f"Plan: {_inputs(plan)}. {_time(plan)} Device memory: {format_bytes(predicted.device_peak_bytes)} of "
        f"{format_bytes(plan.budget_bytes)}; RAM: {format_bytes(predicted.host_peak_bytes)} of "
        f"{format_bytes(plan.host_budget_bytes)}{_own(plan)}. Copied: {dict(_traffic(plan))['copies']}. "
        f"Activations {activations}. Tensors updated: {', '.join(updates) or 'none'}."
    )
    text += "".join(f" {note[0].upper()}{note[1:]}." for note in plan.notes if note.startswith((BINDS, KERNELS)))
    if any(OTHER_BITS in note for note in plan.notes):
        text += f" Gradients are summed in another order: their {OTHER_BITS}, see explain()."
    lines = textwrap.wrap(text, _BRIEF_WIDTH, break_long_words=False, break_on_hyphens=False)
    if plan.batch_curve:
        lines += ["", "Batch sizes:", *_fields(_batch_sizes(plan))]
    return "\n".join(lines)


def _own(plan: Plan) -> str:
    own = plan.process_bytes
    return f", {format_bytes(own)} of it for Python, PyTorch and libraries" if own else ""


def _time(plan: Plan) -> str:
    if not plan.predicted.iteration_s:
        return "It was not simulated."
    unit = "An iteration" if plan.accumulate == 1 else f"A {plan.unit}"
    return f"{unit} takes {_seconds(plan)}, {_cost(plan)}."


def _seconds(plan: Plan) -> str:
    return f"{'about ' if plan.estimated else ''}{format_seconds(plan.predicted.iteration_s)}"


def _cost(plan: Plan) -> str:
    """Return the price of offloading, and the speed where it is known, as the rest of a sentence."""
    predicted = plan.predicted
    slower = predicted.iteration_s / predicted.no_offload_s if predicted.no_offload_s else 1.0
    enough = format_seconds(predicted.no_offload_s)
    return f"{slower:.2f} times the {enough} of a device with enough memory{_rate(plan)}"


def _rate(plan: Plan) -> str:
    """Return the tokens per second as the rest of a sentence, where they are known."""
    if not plan.tokens_per_s:
        return ""
    share = plan.peak_share
    of_peak = "" if share is None else f", {share:.0%} of the rate that the device is specified for"
    return f": {format_rate(plan.tokens_per_s)} tokens per second{of_peak}"


# -- totals ----------------------------------------------------------------------------------------------------------


def samples_of(what: Plan | Profile, times: str = "x") -> str:
    """Return the size of a batch, in words; samples without a length have no tokens."""
    return f"{what.batch_size} {f'{times} {what.sequence_length} tokens' if what.sequence_length > 1 else 'samples'}"


def _inputs(plan: Plan) -> str:
    samples = samples_of(plan)
    tokens = f"batch {samples}" if plan.accumulate == 1 else f"{plan.accumulate} micro-batches of {samples}"
    if plan.forwards > 1:
        tokens += f", {plan.forwards} forwards each"
    if plan.parts > 1:
        tokens += f", each block takes a batch in {plan.parts} parts"
    if plan.tile_tokens:
        tokens += f", tiles of {plan.tile_tokens} tokens within blocks"
    estimated = "; the profile was estimated, not measured" if plan.estimated else ""
    return f"{plan.model}, {len(plan.options)} blocks, {tokens}, planner {plan.planner}{estimated}"


def _prediction(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    if not predicted.iteration_s:
        yield "iteration", _NOT_SIMULATED
        return
    yield "iteration", f"{_seconds(plan)}, {_gap(predicted)}; {_cost(plan)}"


def _gap(predicted: Prediction) -> str:
    bound = format_seconds(predicted.lower_bound_s)
    if predicted.proved:
        return f"{predicted.gap:.1%} above the lower bound of {bound}"
    return f"how near to the best is not proved, as time was up; computations alone take {bound}"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    rest = max(predicted.device_peak_bytes - plan.arena_bytes, 0)
    yield (
        "device memory",
        f"{format_bytes(predicted.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}: "
        f"{format_bytes(plan.arena_bytes)} for weights and optimizer states, up to {format_bytes(rest)} for all else",
    )
    ram = f"{format_bytes(predicted.host_peak_bytes)} of {format_bytes(plan.host_budget_bytes)}{_own(plan)}"
    arriving = sum(op.bytes for op in plan.ops if op.sends_gradients and not plan.begins_sums(op))
    if arriving:
        ram += f"; {format_bytes(plan.gradient_bytes)} for gradients, in which {format_bytes(arriving)} take turns"
    yield "host memory", ram


def _traffic(plan: Plan) -> Iterator[tuple[str, str]]:
    moved: dict[str, int] = defaultdict(int)
    for op, count in zip(plan.ops, plan.counts, strict=True):
        # Passes are listed once and carried out several times, so each op counts as often.
        moved["written" if op.writes_gradients else op.lane] += count * op.bytes
    to_device, to_host = format_bytes(moved["h2d"]), format_bytes(moved["d2h"])
    copies = f"{to_device} to the device, {to_host} to the host per {plan.unit}"
    if moved["compute"]:
        copies += f"; {format_bytes(moved['compute'])} read directly"
    if moved["written"]:
        copies += f"; {format_bytes(moved['written'])} written directly"
    yield "copies", copies
    if plan.predicted.iteration_s:
        yield "busy", ", ".join(f"{LANE[name].title} {share:.0%}" for name, share in plan.busy.items())


def _batch_sizes(plan: Plan) -> Iterator[tuple[str, str]]:
    most = max((point.samples_per_s or 0.0 for point in plan.batch_curve), default=0.0)
    for point in plan.batch_curve:
        size = str(point.batch_size) if point.accumulate == 1 else f"{point.accumulate} x {point.batch_size}"
        parts = f"in {point.parts} parts: " if point.parts > 1 else ""
        if point.samples_per_s is None or point.iteration_s is None:
            yield size, f"{parts}{point.reason}"
            continue
        bar = "#" * round(_BAR * point.samples_per_s / most)
        what = "tokens" if plan.sequence_length > 1 else "samples"
        speed = f"{format_rate(point.samples_per_s * plan.sequence_length)} {what}/s"
        yield size, f"{bar:<{_BAR}} {parts}{speed}, {format_seconds(point.iteration_s)} per update: {point.reason}"


def _alternative(alternative: Alternative) -> tuple[str, str]:
    seconds = "no plan" if alternative.iteration_s is None else format_seconds(alternative.iteration_s)
    return seconds, f"{alternative.planner}: {alternative.reason}"


# -- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _BlockRow:
    index: int
    option: str
    moved: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes per (kind, payload)."""
    places: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Tensors per update place."""
    again: int = 0
    """Forwards that run again."""
    read: int = 0
    """Bytes that computations read directly."""
    written: int = 0
    """Bytes of gradients that the backward writes to the host itself."""


def _blocks(plan: Plan) -> list[_BlockRow]:
    blocks = [_BlockRow(index, option) for index, option in enumerate(plan.options)]
    for op, count in zip(plan.ops, plan.counts, strict=True):
        if op.writes_gradients:
            blocks[op.block].written += count * op.bytes
        elif op.payload is not None:
            # Sums travel with the states of their tensors, and there is no column for them.
            payload = "state" if op.payload == "sum" else op.payload
            blocks[op.block].moved[op.kind, payload] += count * op.bytes
        elif not op.uses_gradients:
            blocks[op.block].read += count * op.bytes
            blocks[op.block].again += op.save is not None
        if op.kind == "update":
            for tensor in plan.tensors(op):
                blocks[op.block].places[plan.update_places[tensor]] += 1
    return blocks


def _kind(block: _BlockRow) -> tuple[object, ...]:
    """Blocks in a row with equal kinds share a line."""
    fetched = tuple(bool(block.moved["prefetch", payload]) for payload in ("weight", "state"))
    zero_copy = bool(block.read), bool(block.written)
    return block.option, bool(block.again), fetched, zero_copy, tuple(sorted(block.places))


def _row(run: Sequence[_BlockRow]) -> tuple[str, ...]:
    first, last = run[0].index, run[-1].index
    copied = _sizes(block.moved["offload", "activation"] for block in run)
    # All blocks of a run are of one kind (`_kind`), so the first one says which columns there are.
    places = {place: [block.places[place] for block in run] for place in _MEANINGS if place in run[0].places}
    activations = run[0].option if copied == "-" else f"{run[0].option} {copied}"
    if run[0].again:
        activations += f", again {_range([block.again for block in run])}x"
    return (
        str(first) if first == last else f"{first}-{last}",
        activations,
        _with_direct([block.moved["prefetch", "weight"] for block in run], [block.read for block in run]),
        _sizes(block.moved["prefetch", "state"] for block in run),
        _with_direct([block.moved["offload", "grad"] for block in run], [block.written for block in run]),
        ", ".join(f"{place} {_range(counts)}" for place, counts in places.items()) or "none",
    )


def _with_direct(copied: list[int], zero_copy: list[int]) -> str:
    if not any(zero_copy):
        return _sizes(copied)
    return f"{_sizes(copied)}, direct {_sizes(zero_copy)}" if any(copied) else f"direct {_sizes(zero_copy)}"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


def _sizes(sizes: Iterable[int]) -> str:
    numbers = list(sizes)
    low, high = format_bytes(min(numbers)), format_bytes(max(numbers))
    if not max(numbers):
        return "-"
    if low == high:
        return high
    # The unit is written once if both ends have it; 0 needs none.
    number, _, unit = low.partition(" ")
    return f"{number}-{high}" if high.endswith(unit) and min(numbers) else f"{low if min(numbers) else 0}-{high}"


# -- layout ----------------------------------------------------------------------------------------------------------


def _legend(plan: Plan) -> list[tuple[str, str]]:
    used = {*plan.options, *plan.update_places, "in, out"}
    if any(op.save is not None for op in plan.ops):
        used.add("again")
    if any(op.bytes and op.lane == "compute" for op in plan.ops):
        used.add("direct")
    by = {"host": _NATIVE * plan.host_kernel}
    return [(word, meaning + by.get(word, "")) for word, meaning in _MEANINGS.items() if word in used]


def _fields(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield lines of a label and a text that is wrapped to the right of it."""
    for label, text in pairs:
        # `wrap` returns no line for an empty text, and its label would be lost.
        lines = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False) or [""]
        for at, line in enumerate(lines):
            yield f"{label if at == 0 else '':<{_LABEL}}{line}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    cells = [
        [textwrap.wrap(cell, limit, break_long_words=False) or [""] for cell, limit in zip(row, _LIMITS, strict=False)]
        for row in rows
    ]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(_LIMITS))]
    indent = sum(width + 2 for width in widths)
    # Never narrower than its heading: textwrap refuses a width below 1, which wide first columns would leave.
    last = [textwrap.wrap(row[-1], max(WIDTH - indent, len(_HEADERS[-1]))) or [""] for row in rows]
    for at, (row, rest) in enumerate(zip(cells, last, strict=True)):
        for lines in zip_longest(*row, rest, fillvalue=""):
            *fixed, free = lines
            yield "  ".join([*(cell.ljust(width) for cell, width in zip(fixed, widths, strict=True)), free]).rstrip()
        if at == 0:
            yield "-" * min(WIDTH, indent + max(len(line) for lines in last for line in lines))
