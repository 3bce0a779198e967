"""The tables of a report: what is done with each block, what travels, what lost, what more of something would buy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from lt_offload.plan.what_if import Gain
from lt_offload.report.perfetto import TITLES, lanes_of
from lt_offload.schema.explain import samples_of
from lt_offload.schema.lanes import LaneName
from lt_offload.schema.plan import Payload, Plan, UpdatePlace
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_bytes, format_seconds

NONE = "–"
"""In a cell: there is nothing of this."""
_PAYLOADS: dict[Payload, str] = {
    "weight": "weights",
    "grad": "gradients",
    "state": "optimizer state",
    "sum": "sums of gradients",
    "activation": "activations",
}
_PLACES: dict[UpdatePlace, str] = {
    "device": "device",
    "paged": "device, state fetched",
    "host": "host",
    "none": "nowhere",
}
_OPTIONS = {
    "keep": "what the backward needs stays on the device",
    "recompute": "only the input is kept, the forward runs again for the backward",
    "offload": "what the backward needs waits in host memory",
    "mixed": "results of costly operations wait in host memory, cheap ones are computed again",
    "reload": "only the input waits in host memory, the forward runs again for the backward",
    "discard": "nothing is kept, the forward runs again from an earlier block's input",
    "fused": "projection and loss are one block: logits exist once, their logarithms a few tokens at a time",
    "chunked": "projection and loss of a few tokens at a time, so that all logits never exist",
}
_NOTICEABLE = 0.005
"""A change of the time that is worth a figure."""


# -- sections and tables --------------------------------------------------------------------------------------------


def section(title: str, note: str, *content: str) -> str:
    """Return a heading, what is to be known about the content, and the content."""
    about = f'<p class="note">{note}</p>' if note else ""
    return f"<h2>{title}</h2>{about}{''.join(content)}"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    marked: int | None = None,
    label: str,
) -> str:
    """Return a table of cells that are HTML already.

    Args:
        head: one heading per column.
        rows: the first cell of each is its heading.
        numeric: the columns set flush right.
        marked: the row that stands out.
        label: what the table is, for those who cannot see it.
    """
    right = set(numeric)

    def cell(tag: str, column: int, content: str, attribute: str) -> str:
        kinds = ["n"] * (column in right) + ["none"] * (content in ("", NONE))
        shown = f"<span>{content}</span>" if tag == "td" else content
        return f'<{tag} class="{" ".join(kinds)}" {attribute}>{shown}</{tag}>'.replace(' class=""', "")

    def line(index: int, row: Sequence[str]) -> str:
        # On a phone a row becomes a list, for which every cell carries its heading.
        first, *rest = row
        cells = [cell("td", i, c, f'data-head="{head[i]}"') for i, c in enumerate(rest, start=1)]
        mark = ' class="marked"' if index == marked else ""
        return f"<tr{mark}>" + cell("th", 0, first, 'scope="row"') + "".join(cells) + "</tr>"

    heading = "".join(cell("th", i, c, 'scope="col"') for i, c in enumerate(head))
    body = "".join(line(index, row) for index, row in enumerate(rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bar_list(rows: Sequence[tuple[str, float | None, str]], *, chosen: int | None = None) -> str:
    """Return horizontal bars: name, length, and what is written beside it. Without a length there is only the text."""
    longest = max((length for _, length, _ in rows if length is not None), default=0.0) or 1.0

    def row(index: int, name: str, length: float | None, text: str) -> str:
        bar = "" if length is None else f'<i style="width:calc((100% - 5.5em) * {length / longest:.4f})"></i>'
        mark = ' class="chosen"' if index == chosen else ""
        return f"<dt>{escape(name)}</dt><dd{mark}>{bar}<span>{escape(text)}</span></dd>"

    return f'<dl class="times">{"".join(row(index, *values) for index, values in enumerate(rows))}</dl>'


# -- decisions -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Travels:
    """Totals of a plan's ops, per tensor and per block."""

    fetched: Counter[int] = field(default_factory=Counter)
    """Bytes of weights copied to the device, per tensor."""
    read: set[int] = field(default_factory=set)
    """Tensors that computations read in host memory."""
    read_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes read so, per block."""
    recomputations: Counter[int] = field(default_factory=Counter)
    """Forwards that run again, per block."""


def _travels(plan: Plan, profile: Profile) -> _Travels:
    travels = _Travels()
    for op in plan.ops:
        if op.kind == "prefetch" and op.payload == "weight":
            for tensor in plan.tensors(op):
                travels.fetched[tensor] += profile.tensors[tensor].bytes
        if op.zero_copy:
            travels.read.update(plan.zero_copy(op))
            travels.read_bytes[op.block] += op.bytes
        if op.save is not None:
            travels.recomputations[op.block] += 1
    return travels


def decisions(plan: Plan, profile: Profile) -> str:
    """Return what is done with the weights, the activations and the update of each block."""
    travels = _travels(plan, profile)
    names = block_names(profile)
    reads = bool(travels.read)
    rows = []
    described = [(block, _decision(block, plan, profile, travels)) for block in range(len(profile.blocks))]
    for cells, run in groupby(described, key=lambda item: item[1]):
        rows.append([_range([names[block] for block, _ in run]), *(cells if reads else cells[:3] + cells[4:])])
    read = ("read in place per iteration",) if reads else ()
    head = ("block", "weights", "stay on device", "fetched per iteration", *read, "activations", "updated on")
    meanings = "".join(
        f"<div><dt>{name}</dt><dd>{meaning}</dd></div>" for name, meaning in _OPTIONS.items() if name in plan.options
    )
    return section(
        "Decisions",
        "Neighbouring blocks that are treated alike share a row; sizes are per block.",
        table(head, rows, numeric=(1, 3, 4) if reads else (1, 3), label="Decisions per block"),
        f'<dl class="meanings">{meanings}</dl>',
    )


def _decision(block: int, plan: Plan, profile: Profile, travels: _Travels) -> tuple[str, ...]:
    mine = [i for i, tensor in enumerate(profile.tensors) if block in tensor.blocks]
    size = sum(profile.tensors[i].bytes for i in mine)
    # What neither comes nor is read in place has been on the device all the time.
    gone = travels.fetched.keys() | travels.read
    interval = sum(profile.tensors[i].bytes for i in mine if i not in gone) / size if size else 1.0
    moved = sum(travels.fetched[i] for i in mine)
    read = travels.read_bytes[block]
    tied = " (tied)" if any(len(profile.tensors[i].blocks) > 1 for i in mine) else ""
    places: dict[UpdatePlace, int] = {}
    for i in mine:
        if profile.tensors[i].trainable:
            place = plan.update_places[i]
            places[place] = places.get(place, 0) + profile.tensors[i].bytes
    return (
        f"{format_bytes(size)}{tied}",
        f'<span class="share"><i style="width:{interval:.0%}"></i></span>{interval:.0%}',
        format_bytes(moved) if moved else NONE,
        format_bytes(read) if read else NONE,
        _activations(block, plan, profile, travels.recomputations[block]),
        _shares(places) or "frozen",
    )


def _activations(block: int, plan: Plan, profile: Profile, recomputations: int) -> str:
    option = profile.blocks[block].option(plan.options[block])
    said: str = option.name
    if option.offload_bytes:
        said += f", {format_bytes(option.offload_bytes)} to host"
    if recomputations:
        said += f", runs again {recomputations}×"
    return said


def _shares(places: Mapping[UpdatePlace, int]) -> str:
    total = sum(places.values())
    ordered = sorted(places.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return _PLACES[ordered[0][0]]
    return ", ".join(f"{_PLACES[place]} {_percent(size / total)}" for place, size in ordered)


def _percent(share: float) -> str:
    """Return a share of several; none of them is nothing or everything."""
    return "&lt;1%" if share < 0.005 else "&gt;99%" if share > 0.995 else f"{share:.0%}"


def block_names(profile: Profile) -> list[str]:
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


# -- traffic ---------------------------------------------------------------------------------------------------------


def traffic(plan: Plan, profile: Profile, predicted: Trace, measured: Trace | None) -> str:
    """Return the bytes and the load per lane."""
    rows = []
    counted = list(zip(plan.ops, plan.counts, strict=True))
    reads = sum(count * op.bytes for op, count in counted if op.zero_copy)
    payloads = {name: title for name, title in _PAYLOADS.items() if name != "sum" or plan.adds_up}
    for lane in lanes_of(predicted):
        on_lane = [(op, count) for op, count in counted if op.lane == lane]
        sizes = [sum(count * op.bytes for op, count in on_lane if op.payload == payload) for payload in payloads]
        # Of a table in two parts the first update stands for both.
        changes = [op for op, _ in on_lane if op.kind == "update" and op.rows != "looked up"] if lane == "host" else []
        updated = [t for op in changes for t in plan.tensors(op)]
        if reads:
            sizes.append(reads if lane == "compute" else 0)
        exchanged = sum(count * op.bytes for op, count in on_lane if op.kind == "reduce")
        sizes.append(sum(sizes) + exchanged + sum(profile.tensors[t].bytes for t in updated))
        busy = [_busy(trace, lane) for trace in (predicted, measured) if trace]
        rows.append([TITLES[lane], *(format_bytes(size) if size else NONE for size in sizes), *busy])
    read = ["weights read in place"] if reads else []
    last = ["busy, predicted", *(["busy, measured"] if measured else [])]
    head = ["lane", *payloads.values(), *read, "together", *last]
    return section(
        "Traffic and load",
        "Bytes per iteration, and the share of the iteration during which each part works; the row of the host update "
        "counts the weights it updates.",
        table(head, rows, numeric=range(1, len(head)), label="Bytes and load per lane"),
    )


def _busy(trace: Trace, lane: LaneName) -> str:
    seconds = trace.busy(lane)
    share = f" <small>{seconds / trace.iteration_time:.0%}</small>" if trace.iteration_time > 0 else ""
    return format_seconds(seconds) + share


# -- what else -------------------------------------------------------------------------------------------------------


def alternatives(plan: Plan, chosen_s: float) -> str:
    """Return the candidates and why they lost."""
    if not plan.alternatives:
        return ""
    rows = [[escape(plan.planner), format_seconds(chosen_s), "chosen"]]
    rows += [
        [escape(a.planner), format_seconds(a.iteration_s) if a.iteration_s is not None else NONE, escape(a.reason)]
        for a in dict.fromkeys(plan.alternatives)
    ]
    return section(
        "Runners-up",
        "Candidates that were generated and simulated.",
        table(("planner", "iteration", "outcome"), rows, numeric=(1,), marked=0, label="Candidates and why they lost"),
    )


def gains(plan: Plan, bought: Sequence[Gain]) -> str:
    """Return what more of each lane would buy."""
    if not bought:
        return ""
    now = plan.predicted
    best = min(range(len(bought)), key=lambda index: bought[index].iteration_s)
    saved = 1 - bought[best].iteration_s / now.iteration_s
    if saved > _NOTICEABLE:
        change = bought[best].change
        answer = f"{escape(change[0].upper() + change[1:])} would buy the most: {saved:.1%} less time."
    else:
        computing = sum(op.seconds for op in plan.ops if op.lane == "compute") / now.iteration_s
        why = f": the device computes during {computing:.0%} of the time" if computing > 0.9 else ""
        answer = f"None of these would make a noticeable difference{why}."
    rows = [["as planned", format_seconds(now.iteration_s), NONE, format_seconds(now.lower_bound_s), ""]]
    for gain in bought:
        less = 1 - gain.iteration_s / now.iteration_s
        rows.append(
            [
                escape(gain.change),
                format_seconds(gain.iteration_s),
                f"−{less:.1%}" if less > _NOTICEABLE else "no change",
                format_seconds(gain.lower_bound_s),
                escape(gain.note),
            ]
        )
    head = ["change", "iteration", "time", "lower bound", "why"]
    if not any(gain.note for gain in bought):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return section(
        "What more would buy",
        f"Planned again for a machine that differs in one thing only. {answer}",
        table(head, rows, numeric=(1, 2, 3), marked=best + 1 if saved > _NOTICEABLE else None, label="Gains"),
    )


# -- settings --------------------------------------------------------------------------------------------------------


def settings(plan: Plan, profile: Profile) -> str:
    """Return what the plan was made for, and the plan's notes."""
    hardware, optimizer = profile.hardware, profile.optimizer
    described: list[tuple[str, str]] = [
        ("planner", plan.planner),
        ("device budget", format_bytes(plan.budget_bytes)),
        ("host budget", format_bytes(plan.host_budget_bytes)),
        ("batch", samples_of(plan, "×")),
        *_fixed(plan, profile),
        ("optimizer", optimizer.name),
        ("update on the host", f"{format_bytes(optimizer.host_bytes_per_s)}/s"),
        ("update on the device", f"{format_bytes(optimizer.device_bytes_per_s)}/s"),
        ("host to device", f"{format_bytes(hardware.h2d_bytes_per_s)}/s"),
        ("device to host", f"{format_bytes(hardware.d2h_bytes_per_s)}/s"),
        ("machine", hardware.name),
        ("times", "estimated" if profile.estimated else "measured"),
        ("source of the machine's figures", hardware.source or "not given"),
        ("model structure", plan.fingerprint),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return section("Plan and machine", "", pairs(described), f'<ul class="notes">{notes}</ul>' if notes else "")


def pairs(described: Iterable[tuple[str, str]]) -> str:
    """Return names and values, which are text, in columns."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in described)
    return f'<dl class="pairs">{cells}</dl>'


def _fixed(plan: Plan, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the parts of device memory that last, and how well the arena is filled."""
    yield "taken before the first tensor", format_bytes(profile.hardware.context_bytes)
    yield "page tables of host memory", format_bytes(profile.page_table_bytes)
    yield "shared by all blocks", format_bytes(profile.shared_bytes)
    yield "allocator slack", format_bytes(profile.slack_bytes)
    yield "arena for weights and states", format_bytes(plan.arena_bytes)
    packing = plan.packing
    if packing is not None:
        yield "arena in use at most", f"{format_bytes(packing.live_peak)} ({packing.waste:.1%} are lost)"
        yield "transfers of weights and states", f"{packing.transfers} for {packing.tensors} copies"
