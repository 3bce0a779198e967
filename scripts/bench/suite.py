"""Trains the same models with lt_offload and with what else there is, in the same device memory, and writes every row.

    python -m scripts.bench.suite --suite others                   beside FSDP2 and transformers' own offload
    python -m scripts.bench.suite --suite small                    two minutes on a large GPU
    python -m scripts.bench.suite --suite papers --minutes 9       as many rows as fit, the most telling ones first
    python -m scripts.bench.suite --suite batches --workload llama3-8b-12gb-4-rows --contender auto fsdp2
    python -m scripts.bench.suite --suite batches --list           what would be run
    python -m scripts.bench.suite --device cpu --suite small       the same programs on the emulated device, tiny models

Every row is a process of its own. Rows that the result file has are not run again without ``--again``, so that a run
can be continued. Memory that runs out and time that runs out are results: rows with a status.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lt_offload.profiling.hardware import available_host_bytes
from lt_offload.units import format_bytes, format_seconds, parse_bytes
from scripts.bench.contenders import CONTENDERS, Contender
from scripts.bench.rows import Results, Row, key, make
from scripts.bench.watch import Limits, Outcome, open_meter, watch
from scripts.bench.workloads import SUITES, Workload, workloads
from scripts.common import RESULTS, child_command, environment, in_child, read_json

CHILD = "scripts.bench.child"
RESERVE_BYTES = 3 * 10**9
"""RAM that is left to the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One row to be measured."""

    workload: Workload
    contender: Contender

    @property
    def asked(self) -> Row:
        """Return the beginning of the row."""
        return {
            "workload": self.workload.name if self.contender.budgeted else self.workload.model,
            "contender": self.contender.name,
            "title": self.contender.title,
            "model": self.workload.model,
            "budget_bytes": self.workload.memory_bytes if self.contender.budgeted else None,
            "date": date.today().isoformat(),
        }


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs that were asked for; what needs no budget once per model."""
    chosen = [
        workload
        for workload in workloads(options.suite, options.device, tiny=options.tiny)
        if workload.name in (options.workload or [workload.name])
    ]
    made: dict[tuple[Any, ...], Job] = {}
    for workload in chosen:
        for name in options.contender or CONTENDERS:
            job = Job(workload=workload, contender=CONTENDERS[name])
            made.setdefault(key(job.asked), job)
    return list(made.values())


class Bench:
    """Runs jobs one after the other."""

    def __init__(self, options: argparse.Namespace, results: Results, folder: Path) -> None:
        self.device: str = options.device
        self.steps: int = options.steps
        self.row_seconds = 60.0 * options.row_minutes
        self.results = results
        self._folder = folder
        self._deadline = time.monotonic() + 60.0 * options.minutes
        self._meter = open_meter() if options.device == "cuda" else None
        self._reserve = RESERVE_BYTES if options.device == "cuda" else 0
        free = max(1, available_host_bytes() - self._reserve)
        self.host_given = options.host_memory is not None
        self.host_bytes = free if options.host_memory is None else parse_bytes(options.host_memory)

    @property
    def left_s(self) -> float:
        """Seconds until the bench as a whole has to end."""
        return self._deadline - time.monotonic()

    def describe(self, settings: dict[str, Any]) -> None:
        """Put into the file what the rows are of."""
        answer = in_child(CHILD, "describe")
        self.results.describe(answer, settings | {"host_bytes": self.host_bytes})

    def run(self, job: Job) -> Row | None:
        """Measure one row; None if it was ended because the time for all ran out."""
        seconds = min(self.row_seconds, self.left_s)
        if seconds <= 0:
            return None
        folder = self._folder / re.sub(r"\W+", "-", job.workload.model)
        folder.mkdir(exist_ok=True)
        answer, outcome, progress = self.train(
            seconds,
            workload=job.workload.as_dict(),
            module=job.contender.module,
            folder=str(folder),
            device=self.device,
            budget_bytes=job.asked["budget_bytes"],
            host_bytes=self.host_bytes,
            host_given=self.host_given,
            steps=self.steps,
        )
        if outcome.ended == "time limit" and seconds < self.row_seconds:
            return None
        return make(job.asked, answer, outcome, progress)

    def train(self, seconds: float, **arguments: Any) -> tuple[Row | None, Outcome, Row]:
        """Run ``child.py``; return its answer, what was seen of it, and what it noted on its way."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            answer, progress, log = (Path(place) / name for name in ("answer.json", "progress.json", "log.txt"))
            command = child_command(CHILD, "train", answer, {"progress": str(progress), **arguments})
            limits = Limits(seconds=seconds, host_bytes=self.host_bytes, reserve_bytes=self._reserve)
            outcome = watch(command, limits, log=log, environment=environment(), meter=self._meter)
            said = read_json(answer) if outcome.code == 0 and answer.exists() else None
            return said, outcome, _noted(progress)


def _noted(progress: Path) -> Row:
    """Return what a process had noted; it may have been ended while it wrote."""
    try:
        return read_json(progress)
    except (OSError, ValueError):
        return {}


def line(row: Row) -> str:
    """Return a row in one line."""
    head = f"{row['workload']:36s} {row['contender']:22s}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['message'][:110]}"
    peak = row.get("device_peak_bytes")
    said = [f"{row['tokens_per_s']:9.0f} tokens/s", f"{format_seconds(row['step_s']):>8s} per step"]
    over = "" if row.get("within_budget", True) else " (OVER THE BUDGET)"
    said += [f"{format_bytes(peak):>8s} device{over}"] if peak is not None else []
    return f"{head} {', '.join(said)}, loss {row['loss']}"


def show(wanted: Sequence[Job], heading: str) -> None:
    """Print jobs."""
    print(f"{heading}: {len(wanted)} rows")
    for job in wanted:
        print(f"  {job.asked['workload']:36s} {job.contender.name}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    gpu = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), default="small")
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="only these of the suite")
    parser.add_argument("--contender", nargs="+", choices=list(CONTENDERS), metavar="NAME", help="only these")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a GPU, too: a smoke test of this script")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default 9)")
    parser.add_argument("--row-minutes", type=float, default=5.0, help="for one process (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per row (default 4)")
    parser.add_argument("--host-memory", metavar="SIZE", help="RAM per process, whatever is free (default: that)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the result file is")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep profiles, and the last plan and trace of each"
    )
    parser.add_argument("--again", action="store_true", help="measure rows again that the file has")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    names = [workload.name for workload in workloads(options.suite, options.device, tiny=options.tiny)]
    for name in options.workload or ():
        if name not in names:
            parser.error(f"--workload {name}: suite {options.suite} has {', '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; return the exit code."""
    options = parse(arguments)
    results = Results(options.out / f"bench-{options.suite}{'' if options.device == 'cuda' else '-emulated'}.json")
    asked = jobs(options)
    wanted = [job for job in asked if options.again or results.find(key(job.asked)) is None]
    show(wanted, f"{results.path} has {len(asked) - len(wanted)} of {len(asked)}; to run")
    if options.list or not wanted:
        return 0
    _end_with_children()
    left_out = []
    with tempfile.TemporaryDirectory() as folder:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, results, options.keep or Path(folder))
        bench.describe({"suite": options.suite, "device": options.device, "steps": options.steps})
        for job in wanted:
            row = bench.run(job)
            if row is None:
                left_out.append(job)
                continue
            results.add(row)
            print(f"{line(row)}   [{format_seconds(row['seconds'])}]", flush=True)
    if left_out:
        show(left_out, "no time was left for; run the same command again")
    return 0


def _end_with_children() -> None:
    """Turn a request to end into an exit, so that the measured process is ended too."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    handler: Callable[[int, Any], None] = leave
    signal.signal(signal.SIGTERM, handler)


if __name__ == "__main__":
    raise SystemExit(main())
