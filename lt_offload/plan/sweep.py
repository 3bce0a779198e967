"""Plans for a row of memory sizes, machines, or numbers of cards or machines, side by side, to choose a card by."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from lt_offload.errors import ConfigError, InfeasibleError
from lt_offload.plan.infeasible import as_setting
from lt_offload.replacing import save_text
from lt_offload.schema.plan import Plan
from lt_offload.units import format_bytes, format_rate, format_seconds, parse_bytes

MOST_POINTS = 40
_FEW_POINTS = 12
"""A range without a step gets the smallest round step with at most so many points."""

Axis = Literal["memory", "host_memory", "hardware", "devices", "nodes"]
_AXES: dict[Axis, tuple[str, str]] = {
    "devices": (r"devi|cards|gpus", "devices=1:8"),
    "nodes": (r"node|machines", "nodes=1:64"),
    "hardware": (r"hard|card|gpu|rtx|[av]100|h200", "hardware=rtx-3060,rtx-3090"),
    "host_memory": (r"host|ram", "host_memory=32GB:128GB"),
    "memory": (r"mem", "memory=6GB:24GB:2GB"),
}
"""Names: words that may have been meant for each, and an example."""
HEAD = ("iteration", "tokens/s", "vs no offload", "device peak", "RAM", "planner")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRange:
    """The range of a sweep: device memory or RAM in bytes, cards or machines by number, or machines by name."""

    axis: Axis
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One machine of a sweep with its plan, or the reason for which there is none."""

    hardware: str
    memory_bytes: int
    host_memory_bytes: int
    devices: int = 1
    """Cards of each machine."""
    nodes: int = 1
    plan: Plan | None = None
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, padding included; 0 without a plan."""
        return self.plan.samples_per_s * self.plan.sequence_length if self.plan else 0.0

    def name(self, axis: Axis) -> str:
        """Return the name that distinguishes this point from the others along ``axis``."""
        if axis == "hardware":
            return self.hardware
        if axis == "devices":
            return f"{self.devices} {'card' if self.devices == 1 else 'cards'}"
        if axis == "nodes":
            return f"{self.nodes} {'machine' if self.nodes == 1 else 'machines'}"
        return format_bytes(self.memory_bytes if axis == "memory" else self.host_memory_bytes)

    def figures(self) -> dict[str, Any]:
        """Return the columns of a saved table; sizes in bytes, times in seconds."""
        plan = self.plan
        promise = plan.predicted if plan else None
        shared = ("iteration_s", "lower_bound_s", "no_offload_s", "device_peak_bytes", "host_peak_bytes")
        return {
            **{
                key: getattr(self, key) for key in ("hardware", "memory_bytes", "host_memory_bytes", "devices", "nodes")
            },
            "batch_size": plan.batch_size if plan else None,
            "tokens_per_s": self.tokens_per_s or None,
            **{key: getattr(promise, key, None) for key in shared},
            "planner": plan.planner if plan else None,
            "reason": self.reason,
        }

    def row(self, axis: Axis) -> tuple[str, ...]:
        """Return the cells of a table: the name, and what ``HEAD`` lists; a reason in the place of the planner."""
        if self.plan is None:
            return (self.name(axis), *[""] * (len(HEAD) - 1), self.reason)
        promise = self.plan.predicted
        return (
            self.name(axis),
            format_seconds(promise.iteration_s),
            format_rate(self.tokens_per_s),
            f"{promise.iteration_s / promise.no_offload_s:.2f}x" if promise.no_offload_s else "",
            format_bytes(promise.device_peak_bytes),
            format_bytes(promise.host_peak_bytes),
            self.plan.planner,
        )


# -- what is asked ---------------------------------------------------------------------------------------------------


def parse_sweep(text: str) -> SweepRange:
    """Return the range of ``text``: ``memory=6GB:24GB``, ``memory=6GB:24GB:2GB``, ``memory=8GB,12GB``, or names.

    Raises:
        ConfigError: if it is not of that form; says what is.
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    axis = next((axis for axis in _AXES if axis == name), None)
    if axis is None or not equals or not value.strip():
        raise ConfigError(f"sweep={text!r} is not understood; write {_nearest(text)}")
    example, counted = _AXES[axis][1], axis in ("devices", "nodes")
    parts = [part.strip() for part in re.split("," if "," in value or axis == "hardware" else ":", value)]
    if axis == "hardware":
        return SweepRange(axis=axis, names=tuple(_machines(parts, text)))
    if counted and not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"sweep={text!r} is not understood; write {example}, or {axis}=1,2,4,8")
    sizes = [int(part) if counted else parse_bytes(part, setting=f"sweep: {axis}") for part in parts]
    if "," in value or (counted and len(sizes) == 1):
        return SweepRange(axis=axis, sizes=_few(sorted(set(sizes)), f"sweep={text!r}"))
    if len(sizes) not in (2, 3) or sizes[0] >= sizes[1]:
        raise ConfigError(f"sweep={text!r} is not a range; write {example} (from:to:step, where from is less than to)")
    first, last, *rest = sizes
    if counted and not rest and last - first >= _FEW_POINTS:
        powers = [first << n for n in range(last.bit_length()) if first << n <= last]
        return SweepRange(axis=axis, sizes=_few(powers, f"sweep={text!r}"))
    step = rest[0] if rest else _round_step(last - first)
    if (points := (last - first) // step + 1) > MOST_POINTS:
        ends = [str(size) if counted else as_setting(size) for size in (first, last, _round_step(last - first))]
        raise ConfigError(
            f"sweep={text!r} has {points} points, at most {MOST_POINTS} are planned; write {axis}={':'.join(ends)}"
        )
    return SweepRange(axis=axis, sizes=tuple(range(first, last + 1, step)))


def _few(sizes: Sequence[int], said: str) -> tuple[int, ...]:
    if len(sizes) > MOST_POINTS:
        raise ConfigError(f"{said} has {len(sizes)} points, at most {MOST_POINTS} are planned; leave some out")
    return tuple(sizes)


def _nearest(text: str) -> str:
    first = text.partition("=")[0].strip().lower()
    axis, example = next(((axis, form) for axis, (words, form) in _AXES.items() if re.search(words, first)), ("", ""))
    sizes = re.findall(r"[0-9][0-9.]* *[kmgt]i?b", text, flags=re.IGNORECASE)
    if axis in ("memory", "") and len(sizes) >= 2:
        return f"memory={':'.join(sizes[:3])}"
    return example or f"one of {', '.join(form for _, form in reversed(_AXES.values()))}"


def _machines(parts: list[str], text: str) -> Iterator[str]:
    """Yield machines; ``host=``, ``ram=``, ``free=``, ``link=`` and ``net=`` belong to the machine before them."""
    if "" in parts:
        raise ConfigError(f"sweep={text!r} has an empty name; write {_AXES['hardware'][1]}")
    machine = parts[0]
    for part in parts[1:]:
        if "=" in part:
            machine += f",{part}"
            continue
        yield machine
        machine = part
    yield machine


def _round_step(span: int) -> int:
    power = 10 ** max(0, len(str(span)) - 3)
    steps = (factor * power * 10**more for more in range(4) for factor in (1, 2, 4, 5))
    step: int = next(step for step in steps if span // step + 1 <= _FEW_POINTS)
    return step


# -- planning --------------------------------------------------------------------------------------------------------


def run_sweep(
    axis: Axis, questions: Sequence[tuple[SweepPoint, Callable[[], Plan]]], say: Callable[[str], None]
) -> tuple[list[SweepPoint], str]:
    """Return the points with their plans, and the answer in a sentence.

    Args:
        axis: what differs between the points.
        questions: points without plans, ascending along an axis of sizes, and what makes the plan of each; it raises
            ``InfeasibleError`` if there is none.
        say: is told what is being solved.
    """
    points: list[SweepPoint] = []
    smallest: int | None = None
    for at, (point, solve) in enumerate(questions, start=1):
        say(f"{at} of {len(questions)}: planning for {point.name(axis)}")
        try:
            point = replace(point, plan=solve())
        except InfeasibleError as error:
            point = replace(point, reason=reason(error))
            smallest = error.needed_bytes or smallest
        # A plan for less memory is one for more: within its time limit the search may miss it.
        if axis in ("memory", "host_memory") and points and points[-1].tokens_per_s > point.tokens_per_s:
            point = replace(point, plan=_with_bound(points[-1].plan, point.plan), reason="")
        points.append(point)
    return points, _headline(axis, points, smallest)


def _with_bound(plan: Plan | None, other: Plan | None) -> Plan | None:
    """Return ``plan`` with the lower bound of ``other``, which was made for more memory: that of less is none there."""
    if plan is None or other is None:
        return plan
    return replace(plan, predicted=replace(plan.predicted, lower_bound_s=other.predicted.lower_bound_s))


def reason(error: InfeasibleError) -> str:
    """Return the need in a few words."""
    if error.needed_bytes is not None:
        return f"needs memory={as_setting(error.needed_bytes)}"
    if error.needed_host_bytes is not None:
        return f"needs host_memory={as_setting(error.needed_host_bytes)}"
    return str(error)


def _headline(axis: Axis, points: Sequence[SweepPoint], smallest: int | None) -> str:
    """Return the answer in a sentence: the least that works, and the size from which on more buys little."""
    planned = [point for point in points if point.plan is not None]
    if not planned:
        sized = smallest is not None and axis in ("memory", "host_memory")
        return "Nothing in this range is enough." + (
            f" The smallest that does is {format_bytes(smallest)}." if smallest is not None and sized else ""
        )
    best = max(planned, key=lambda point: point.tokens_per_s)
    if axis == "hardware":
        return f"{best.hardware} is the fastest: {format_rate(best.tokens_per_s)} tokens per second."
    if axis in ("devices", "nodes"):
        first, last = planned[0], planned[-1]
        one = first.tokens_per_s / (first.devices if axis == "devices" else first.nodes)
        return f"{last.name(axis)} are {last.tokens_per_s / one:.2f} times as fast as one."
    enough = next(point for point in planned if point.tokens_per_s >= 0.95 * best.tokens_per_s)
    least = f"{format_bytes(smallest)} is the least that works. " if smallest and axis == "memory" else ""
    return f"{least}From {enough.name(axis)} on, more is worth less than 5 %."


def save_sweep(path: str | Path, points: Sequence[SweepPoint]) -> Path:
    """Write the figures of ``points`` as CSV or JSON, one line or object per point, and return the path."""
    rows = [point.figures() for point in points]
    if Path(path).suffix.lower() != ".csv":
        return save_text(path, json.dumps(rows, indent=2))
    table = StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return save_text(path, table.getvalue())
