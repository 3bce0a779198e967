"""A run folder, read: metrics of all its parts, samples, settings, how it went. Needs no torch.

A resumed run leaves the metrics of its parts in ``metrics-1.csv``, ``metrics-2.csv`` ... and ``metrics.csv``; steps
that were taken again count once, as the later part took them.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lt_offload.errors import ConfigError, PlanError
from lt_offload.nested import dotted
from lt_offload.replacing import write_text
from lt_offload.resources import is_dir, is_file, user_path
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from lt_offload.schema.trace import Trace
from lt_offload.units import format_seconds
from lt_offload.yaml_files import read_yaml

_NOTICEABLE = 0.02
"""The slowest is named where its own time is longer than the next one's by more than this part of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessTimes:
    """Medians of one process, in seconds per step."""

    rank: int
    host: str
    step_s: float
    """Time from the start of a step to the start of the next one, without validation and checkpoints."""
    waited_s: float
    """The part of ``step_s`` spent waiting for other processes, before a batch and before gradients are added up."""

    @property
    def own_s(self) -> float:
        """Time of a step without the waiting."""
        return self.step_s - self.waited_s

    @property
    def name(self) -> str:
        """Its number and its machine."""
        return f"process {self.rank} on {self.host}"


def told(times: Sequence[ProcessTimes]) -> str:
    """Return the slowest process and the longest wait as the rest of a sentence; empty without ``times``."""
    if not times:
        return ""
    longest = max(times, key=lambda one: one.waited_s)
    *others, second, slow = sorted(times, key=lambda one: one.own_s) if len(times) > 1 else (*times, *times)
    if slow.own_s - second.own_s <= _NOTICEABLE * slow.step_s:
        return f"none is slower than all others; they wait {format_seconds(longest.waited_s)} of a step at most"
    middle = [*others, second][len(others) // 2]
    return (
        f"{slow.name} is the slowest: its part of a step takes {format_seconds(slow.own_s)}, the others' "
        f"{format_seconds(middle.own_s)}; {longest.name} waits {format_seconds(longest.waited_s)} of each"
    )


SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.csv"
_PART = re.compile(r"metrics-(\d+)\.csv")

Curve = Sequence[tuple[int, float]]
"""(steps that were done, value), ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSample:
    """Text that the model generated after a prompt."""

    step: int
    """Steps that were done."""
    val_loss: float | None
    """The validation loss then, if there was one."""
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """One stretch of a run, from a start to its end: a run that was resumed has several."""

    first_step: int
    last_step: int
    ended: str
    """``finished``, ``interrupted`` or ``failed``."""
    error: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: ``start``, ``steps``, ``between``, ``validation``, ``samples``, ``checkpoints``."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    process_peak_bytes: int | None = None
    """Most RAM that the whole process had, with the libraries' own."""
    tokens: int = 0
    trained_tokens: int = 0
    loss_before: float | None = None
    """Held-out loss before the first step."""
    processes: tuple[ProcessTimes, ...] = ()
    """Times of several processes that wait for each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The files of a run, parsed, as far as the run came."""

    path: Path
    curves: Mapping[str, Curve]
    """Curves by the names of their metrics."""
    samples: Sequence[RunSample]
    settings: Mapping[str, object]
    """Settings of ``config.yaml`` by dotted names."""
    environment: Mapping[str, Any]
    parts: Sequence[RunPart]
    plan: Plan | None
    profile: Profile | None
    trace: Trace | None
    warnings: Sequence[str] = ()
    """Files that could not be read, one sentence each."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def model(self) -> str:
        """Short name of the model."""
        name = str(self.settings.get("model.name") or "")
        if name:
            return Path(name).name
        return self.plan.model if self.plan is not None else self.name

    def curve(self, name: str) -> Curve:
        """Return the metric called ``name``; empty if it was not logged."""
        return self.curves.get(name, ())

    def median(self, name: str) -> float | None:
        """Return the median of a metric over the second half of its records, when what is slow at first is over."""
        values = [value for _, value in self.curve(name)]
        # The first steps compile, make states and fill caches.
        return median(values[len(values) // 2 :]) if values else None

    def largest(self, name: str) -> int | None:
        """Return the largest of a field over all parts, e.g. ``device_peak_bytes``, or of the metric of that name."""
        known = [value for part in self.parts if (value := getattr(part, name)) is not None]
        # A run that was killed has written no summary, but its metrics.
        logged = [round(value * 1e9) for _, value in self.curve(name.replace("_bytes", "_gb"))]
        return max(known or logged, default=None)

    @property
    def losses(self) -> dict[str, Curve]:
        """The losses of training and on held-out data, that before training included."""
        before = [(0, part.loss_before) for part in self.parts if part.loss_before is not None and not part.first_step]
        return {
            "training loss": self.curve("train_loss"),
            "held-out loss": [*before[-1:], *self.curve("val_loss")],
        }

    @property
    def steps(self) -> int:
        """Steps that were done."""
        logged = [curve[-1][0] for curve in self.curves.values() if curve]
        return max([*logged, *(part.last_step for part in self.parts)], default=0)


def read_run(path: str | Path) -> RunFolder:
    """Return the parsed run folder ``path``; raises ``ConfigError`` if it is not a run folder."""
    folder = user_path(path)
    if not is_dir(folder):
        why = "it is a file" if is_file(folder) else "there is no such folder"
        raise ConfigError(f"{str(path)!r} is not a run folder: {why}; give a folder such as runs/quickstart-...")
    if not any((folder / name).is_file() for name in ("config.yaml", METRICS, SUMMARY)):
        raise ConfigError(
            f"{str(path)!r} is not a run folder: it has neither config.yaml nor {METRICS}; give a folder that a run "
            "of lt-finetune has written, such as runs/quickstart-..."
        )
    warnings: list[str] = []

    def load(kind: Any, name: str) -> Any:
        if not (folder / name).is_file():
            return None
        try:
            return kind.load(folder / name)
        # A file that is broken costs the page what it would have told, and no more.
        except PlanError as error:
            warnings.append(str(error))
            return None

    return RunFolder(
        path=folder,
        curves=_curves(folder, warnings),
        samples=tuple(_samples(folder / SAMPLES)),
        settings=dict(dotted(_mapping(folder / "config.yaml", read_yaml, warnings))),
        environment=_mapping(folder / ENVIRONMENT, json.loads),
        parts=tuple(read_parts(folder)),
        plan=load(Plan, "plan.json"),
        profile=load(Profile, "profile.json"),
        trace=load(Trace, "trace.json"),
        warnings=tuple(warnings),
    )


def read_parts(folder: Path) -> list[RunPart]:
    """Return the parts of a run that ended by themselves; a process that was killed has written none."""
    from pydantic import TypeAdapter, ValidationError

    parts = []
    for part in _mapping(folder / SUMMARY, json.loads).get("parts") or ():
        # A later version of this package may have written other fields: what it adds is left out.
        with suppress(ValidationError):
            parts.append(TypeAdapter(RunPart).validate_python(part))
    return parts


def write_part(folder: Path, part: RunPart) -> None:
    """Add ``part`` to the summary of a run, in place of the parts whose steps it repeats."""
    # A resumed run begins at a checkpoint: parts from there on were taken again.
    parts = [before for before in read_parts(folder) if before.first_step < part.first_step]
    text = json.dumps({"parts": [asdict(part) for part in [*parts, part]]}, indent=2)
    write_text(folder / SUMMARY, text + "\n")


def without_later(path: Path, step: int) -> None:
    """Take samples after ``step`` out of the file ``path``."""
    kept = [sample for sample in _samples(path) if sample.step <= step]
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in kept)
    write_text(path, "".join(lines))


def _curves(folder: Path, warnings: list[str]) -> dict[str, Curve]:
    numbered = sorted((int(m[1]), path) for path in folder.iterdir() if (m := _PART.fullmatch(path.name)))
    merged: dict[str, dict[int, float]] = defaultdict(dict)
    for path in [*(path for _, path in numbered), folder / METRICS]:
        if not path.is_file():
            continue
        try:
            rows = list(_rows(path))
        except (OSError, ValueError, csv.Error) as error:
            warnings.append(f"{path.name} cannot be read: {error}")
            continue
        # A run that was left where a validation was due begins with it: that step is told of in the part before.
        steps = [step for step, _ in rows]
        taken = [step for step, values in rows if any(n != "epoch" and n[:4] != "val_" for n in values)] or steps
        first = min(taken, default=0)
        for name, curve in merged.items():
            merged[name] = {step: value for step, value in curve.items() if step < first}
        for step, values in rows:
            for name, value in values.items():
                merged[name][step] = value
    return {name: tuple(sorted(curve.items())) for name, curve in merged.items() if curve}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = row.pop("step", None)
            if not step:  # a line that was being written when the power went
                continue
            # Lightning counts from 0; what a row tells is known when its step is done.
            yield int(step) + 1, {name: float(value) for name, value in row.items() if name and value}


def _samples(path: Path) -> Iterator[RunSample]:
    if not path.is_file():
        return
    last: dict[tuple[int, str], RunSample] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):  # what else ends lines may be in the texts
        try:
            sample = RunSample(**json.loads(line))
        except (ValueError, TypeError):  # a line that was being written when the power went
            continue
        last[sample.step, sample.prompt] = sample
    yield from sorted(last.values(), key=lambda sample: sample.step)


def _mapping(path: Path, read: Callable[[str], Any], warnings: list[str] | None = None) -> dict[str, Any]:
    """Return the mapping in a file; empty without one, or if it cannot be read, of which ``warnings`` tell."""
    try:
        value = read(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        if warnings is not None:
            warnings.append(f"{path.name} cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}
