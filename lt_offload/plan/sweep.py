"""Plans for a row of memory sizes, machines, or numbers of cards or machines, side by side, to choose a card by."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.infeasible import as_setting
from lt_offload.schema.files import load_json, save_json
from lt_offload.schema.plan import Plan
from lt_offload.units import format_bytes, format_rate, format_seconds, parse_bytes

SWEEP_SCHEMA = 1
MOST_POINTS = 40
_LITTLE = 0.5
"""A further card that is worth less of one card than this is said to buy little."""
_FEW_POINTS = 12
"""A range without a step gets the smallest round step with at most so many points."""

Axis = Literal["memory", "host_memory", "hardware", "devices", "nodes"]
_EXAMPLES: dict[Axis, str] = {
    "memory": "memory=6GB:24GB:2GB",
    "host_memory": "host_memory=32GB:128GB",
    "hardware": "hardware=rtx-3060,rtx-3090",
    "devices": "devices=1:8",
    "nodes": "nodes=1:64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRange:
    """The range of a sweep: device memory or RAM in bytes, cards or machines by number, or machines by name."""

    axis: Axis
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One plan of a sweep, or why there is none; sizes in bytes, times in seconds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    hardware: str
    memory_bytes: int
    host_memory_bytes: int
    devices: int = 1
    """Cards of each machine."""
    nodes: int = 1
    batch_size: int | None = None
    iteration_s: float | None = None
    """None, as all that follows: no plan fits."""
    tokens_per_s: float | None = None
    lower_bound_s: float | None = None
    no_offload_s: float | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    planner: str | None = None
    reason: str = ""
    """Why no plan fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The points of a sweep in ascending order, or in that of the machines asked for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    axis: Axis
    model: str
    dtype: str
    sequence_length: int
    points: tuple[SweepPoint, ...]
    smallest_bytes: int | None = None
    """The smallest device memory that any plan fits into, where one of the points had less."""
    schema: int = SWEEP_SCHEMA

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read JSON; raises ``PlanError`` if it is not a sweep of this schema version."""
        return load_json(cls, path, schema=SWEEP_SCHEMA)

    def save(self, path: str | Path) -> Path:
        """Write JSON, or CSV with one line per point if ``path`` ends so."""
        target = Path(path)
        if target.suffix.lower() != ".csv":
            return save_json(self, target)
        names = [field.name for field in fields(SweepPoint)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(point, name) for name in names] for point in self.points)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.getvalue(), encoding="utf-8")
        return target

    def explain(self) -> str:
        """Return a table, in at most 100 columns."""
        return "\n".join(_explain(self)) + "\n"


# -- what is asked ---------------------------------------------------------------------------------------------------


def parse_sweep(text: str) -> SweepRange:
    """Return the range of ``text``: ``memory=6GB:24GB``, ``memory=6GB:24GB:2GB``, ``memory=8GB,12GB``, or names.

    Raises:
        ConfigError: if it is not of that form; says what is.
    """
    axis, equals, value = text.partition("=")
    axis = axis.strip().replace("-", "_")
    if axis not in _EXAMPLES or not equals or not value.strip():
        raise ConfigError(f"sweep={text!r} is not understood; write {_nearest(text)}")
    parts = [part.strip() for part in re.split("," if "," in value or axis == "hardware" else ":", value)]
    if axis == "hardware":
        return SweepRange(axis="hardware", names=tuple(_machines(parts, text)))
    if axis in ("devices", "nodes"):
        counted: Axis = "devices" if axis == "devices" else "nodes"
        return SweepRange(axis=counted, sizes=tuple(_counts(parts, text, counted, ranged="," not in value)))
    name: Axis = "memory" if axis == "memory" else "host_memory"
    sizes = [parse_bytes(part, setting=f"sweep: {name}") for part in parts]
    if "," not in value:
        sizes = _range(sizes, text, name)
    return SweepRange(axis=name, sizes=tuple(sorted(set(sizes))))


def _nearest(text: str) -> str:
    """Return the form nearest to ``text``."""
    first = text.partition("=")[0].strip().lower()
    if re.search(r"devi|cards|gpus", first):
        return _EXAMPLES["devices"]
    if re.search(r"node|machines", first):
        return _EXAMPLES["nodes"]
    if re.search(r"host|ram", first):
        return _EXAMPLES["host_memory"]
    if re.search(r"hard|card|gpu|rtx|[av]100|h200", first):
        return _EXAMPLES["hardware"]
    sizes = re.findall(r"[0-9][0-9.]* *[kmgt]i?b", text, flags=re.IGNORECASE)
    if len(sizes) >= 2:
        return f"memory={':'.join(sizes[:3])}"
    return _EXAMPLES["memory"] if "mem" in first else f"one of {', '.join(_EXAMPLES.values())}"


def _machines(parts: list[str], text: str) -> Iterator[str]:
    """Yield machines; ``host=``, ``ram=``, ``link=`` and ``net=`` belong to the machine before them."""
    machine = ""
    for part in parts:
        if "=" in part and machine:
            machine += f",{part}"
            continue
        if machine:
            yield machine
        machine = part
        if not part:
            raise ConfigError(f"sweep={text!r} has an empty name; write {_EXAMPLES['hardware']}")
    yield machine


def _counts(parts: list[str], text: str, axis: Axis, *, ranged: bool) -> list[int]:
    """Return numbers of cards or machines, ascending; of a long range without a step each twice the one before."""
    if not all(part.isdecimal() and int(part) for part in parts) or (ranged and len(parts) > 3):
        raise ConfigError(f"sweep={text!r} is not understood; write {_EXAMPLES[axis]}, or {axis}=1,2,4,8")
    counts = [int(part) for part in parts]
    if ranged and len(counts) > 1:
        first, last, step = (*counts, 1)[:3]
        if len(counts) == 2 and last - first >= _FEW_POINTS:
            counts = [first << power for power in range(last.bit_length()) if first << power <= last]
        else:
            counts = list(range(first, last + 1, step))
    if not counts or len(counts) > MOST_POINTS:
        raise ConfigError(f"sweep={text!r} has {len(counts)} points; write {_EXAMPLES[axis]}, smallest first")
    return sorted(set(counts))


def _range(sizes: list[int], text: str, axis: Axis) -> list[int]:
    if len(sizes) not in (2, 3) or sizes[0] >= sizes[1]:
        raise ConfigError(
            f"sweep={text!r} is not a range; write {_EXAMPLES[axis]} (from:to:step, where from is less than to)"
        )
    first, last, *rest = sizes
    step = rest[0] if rest else _round_step(last - first)
    if (last - first) // step + 1 > MOST_POINTS:
        raise ConfigError(
            f"sweep={text!r} has {(last - first) // step + 1} points, at most {MOST_POINTS} are planned; "
            f"write {axis}={as_setting(first)}:{as_setting(last)}:{as_setting(_round_step(last - first))}"
        )
    return list(range(first, last + 1, step))


def _round_step(span: int) -> int:
    power = 10 ** max(0, len(str(span)) - 3)
    steps = (factor * power * 10**more for more in range(4) for factor in (1, 2, 4, 5))
    step: int = next(step for step in steps if span // step + 1 <= _FEW_POINTS)
    return step


# -- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One point before it is planned. ``solve`` returns its plan; raises ``InfeasibleError`` if there is none."""

    hardware: str
    memory_bytes: int
    host_memory_bytes: int
    solve: Callable[[], Plan]
    devices: int = 1
    """Cards of each machine, each of which carries the plan out."""
    nodes: int = 1


def run_sweep(
    axis: Axis, questions: list[Question], *, model: str, dtype: str, sequence_length: int, say: Callable[[str], None]
) -> Sweep:
    """Plan every point. A plan for less memory fits into more, so along memory no point is worse than the one before.

    Args:
        axis: what differs between the questions.
        questions: the points, ascending along an axis of sizes.
        model: name of the model.
        dtype: of its weights.
        sequence_length: tokens per sequence.
        say: is told what is being solved.
    """
    points: list[SweepPoint] = []
    smallest: int | None = None
    for at, question in enumerate(questions, start=1):
        point = SweepPoint(
            hardware=question.hardware,
            memory_bytes=question.memory_bytes,
            host_memory_bytes=question.host_memory_bytes,
            devices=question.devices,
            nodes=question.nodes,
        )
        say(f"{at} of {len(questions)}: planning for {_label(point, axis)}")
        try:
            point = _planned(point, question.solve())
        except InfeasibleError as error:
            point = replace(point, reason=reason(error))
            smallest = error.needed_bytes or smallest
        # A plan for less memory is one for more: within its time limit the search may miss it.
        if axis in ("memory", "host_memory") and points:
            point = _no_worse(point, points[-1])
        points.append(point)
    return Sweep(
        axis=axis,
        model=model,
        dtype=dtype,
        sequence_length=sequence_length,
        points=tuple(points),
        smallest_bytes=smallest if axis in ("memory", "host_memory") else None,
    )


def _planned(point: SweepPoint, plan: Plan) -> SweepPoint:
    predicted = plan.predicted
    return replace(
        point,
        batch_size=plan.batch_size,
        iteration_s=predicted.iteration_s,
        tokens_per_s=plan.samples_per_s * plan.sequence_length,
        lower_bound_s=predicted.lower_bound_s,
        no_offload_s=predicted.no_offload_s,
        device_peak_bytes=predicted.device_peak_bytes,
        host_peak_bytes=predicted.host_peak_bytes,
        planner=plan.planner,
    )


def _no_worse(point: SweepPoint, before: SweepPoint) -> SweepPoint:
    """Return ``point``, with the plan of the point ``before`` it, which has less memory, if that is the faster one."""
    if (point.tokens_per_s or 0.0) >= (before.tokens_per_s or 0.0):
        return point
    return replace(
        before,
        memory_bytes=point.memory_bytes,
        host_memory_bytes=point.host_memory_bytes,
        lower_bound_s=point.lower_bound_s or before.lower_bound_s,
    )


def reason(error: InfeasibleError) -> str:
    """Return the need in a few words."""
    if error.needed_bytes is not None:
        return f"needs memory={as_setting(error.needed_bytes)}"
    if error.needed_host_bytes is not None:
        return f"needs host_memory={as_setting(error.needed_host_bytes)}"
    return str(error)


# -- for people ------------------------------------------------------------------------------------------------------


def _label(point: SweepPoint, axis: Axis) -> str:
    if axis in ("devices", "nodes"):
        return name_of(point, axis)
    if axis == "hardware":
        return f"{format_bytes(point.memory_bytes)} on {point.hardware}"
    return format_bytes(point.memory_bytes) if axis == "memory" else f"{format_bytes(point.host_memory_bytes)} of RAM"


def name_of(point: SweepPoint, axis: Axis) -> str:
    """Return the name that distinguishes ``point`` from the others."""
    if axis == "hardware":
        return point.hardware
    if axis == "devices":
        return f"{point.devices} {'card' if point.devices == 1 else 'cards'}"
    if axis == "nodes":
        return f"{point.nodes} {'machine' if point.nodes == 1 else 'machines'}"
    return format_bytes(point.memory_bytes if axis == "memory" else point.host_memory_bytes)


def headline(sweep: Sweep) -> str:
    """Return the answer in a sentence: the least that works, and the size from which on more buys little."""
    planned = [point for point in sweep.points if point.tokens_per_s]
    if not planned:
        least = f" The smallest that does is {format_bytes(sweep.smallest_bytes)}." if sweep.smallest_bytes else ""
        return f"Nothing in this range is enough.{least}"
    best = max(point.tokens_per_s or 0.0 for point in planned)
    enough = next(point for point in planned if (point.tokens_per_s or 0.0) >= 0.95 * best)
    if sweep.axis == "hardware":
        winner = max(planned, key=lambda point: point.tokens_per_s or 0.0)
        return f"{winner.hardware} is the fastest: {format_rate(winner.tokens_per_s or 0.0)} tokens per second."
    if sweep.axis in ("devices", "nodes"):
        return _cards(planned, sweep.axis)
    said = f"From {name_of(enough, sweep.axis)} on, more is worth less than 5 %."
    if sweep.smallest_bytes and sweep.axis == "memory":
        said = f"{format_bytes(sweep.smallest_bytes)} is the least that works. {said}"
    return said


def _cards(planned: list[SweepPoint], axis: Axis) -> str:
    """Return the speedup in words, and the number from which on a further card or machine buys little."""

    def count(point: SweepPoint) -> int:
        return point.devices if axis == "devices" else point.nodes

    first, last = planned[0], planned[-1]
    rate_of_one = (first.tokens_per_s or 0.0) / count(first)

    def worth(before: SweepPoint, after: SweepPoint) -> float:
        more = (after.tokens_per_s or 0.0) - (before.tokens_per_s or 0.0)
        return more / rate_of_one / (count(after) - count(before))

    times = (last.tokens_per_s or 0.0) / rate_of_one
    said = f"{name_of(last, axis)} are {times:.2f} times as fast as one."
    little = next((b for a, b in pairwise(planned) if worth(a, b) < _LITTLE), None)
    if little is not None:
        said += f" From {name_of(little, axis)} on, a further one buys less than half of one."
    return said


def _explain(sweep: Sweep) -> Iterator[str]:
    batches = sorted({point.batch_size for point in sweep.points if point.batch_size})
    batch = f"batch {'-'.join(map(str, batches[:: max(1, len(batches) - 1)]))} x " if batches else ""
    yield f"{sweep.model}, {sweep.dtype}, {batch}{sweep.sequence_length} tokens; times and peaks are simulated"
    yield ""
    head = (sweep.axis.replace("_", " "), "iteration", "tokens/s", "vs no offload", "device peak", "RAM", "planner")
    rows = [head, *(_row(point, sweep.axis) for point in sweep.points)]
    # A row without a plan has its reason in place of the figures; it sets no widths.
    widths = [max(len(row[column]) for row in rows if len(row) == len(head)) for column in range(len(head))]
    widths[0] = max(len(row[0]) for row in rows)
    for at, row in enumerate(rows):
        first, *middle, last = row
        cells = (cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=False))
        yield "  ".join([first.ljust(widths[0]), *cells, last])
        if at == 0:
            yield "-" * min(100, sum(widths) + 2 * (len(head) - 1))
    yield ""
    yield headline(sweep)


def _row(point: SweepPoint, axis: Axis) -> tuple[str, ...]:
    name = name_of(point, axis)
    if point.iteration_s is None:
        return name, point.reason
    return (
        name,
        format_seconds(point.iteration_s),
        format_rate(point.tokens_per_s or 0.0),
        f"{point.iteration_s / point.no_offload_s:.2f}x" if point.no_offload_s else "",
        format_bytes(point.device_peak_bytes or 0),
        format_bytes(point.host_peak_bytes or 0),
        point.planner or "",
    )
