"""Trainings in processes of their own, so that none ends the others; what each said, and what of it is printed."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scripts.common import machine_measured_once, save
from tests import fake_cuda

if TYPE_CHECKING:
    from scripts.attack.compared import Found

Key = TypeVar("Key")
Work = Callable[[], "Iterator[Found]"]
"""What a process does: it can be pickled, and yields how each run has ended."""
HARMLESS = ("equal", "planned", "refused", "not run")


def options_of(parser: argparse.ArgumentParser, file: str) -> argparse.Namespace:
    """Add the options that such programs have in common; make a fake GPU if one is asked for, and prepare for forks.

    Args:
        parser: with the options of one program.
        file: name of its results.
    """
    parser.add_argument("--device", choices=("fake",), help="without it a GPU, or else the emulated device")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once (default 1)")
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS", help="of a process (default 300)")
    parser.add_argument("--file", default=file, metavar="NAME", help=f"of the results (default {file})")
    options = parser.parse_args()
    if options.device == "fake":
        fake_cuda.enable()
    prepare()
    return options


def compared(
    works: Mapping[Key, Work],
    described: Callable[[Key, list[dict[str, Any]]], dict[str, Any]],
    options: argparse.Namespace,
    *,
    kind: str,
    before: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> int:
    """Do all works, show and save how their runs ended; return 1 if anything is neither equal nor refused.

    Args:
        works: by name or number.
        described: returns what else a row says.
        options: of the command line.
        kind: of the results.
        before: rows that are there; those of ``works`` take the place of theirs.
        settings: what else they are of.
    """
    rows: dict[Key, dict[str, Any]] = {}
    for key, runs in tried(works, options.limit, options.jobs):
        rows[key] = {"name": key, "runs": runs, **described(key, runs)}
        _show(rows[key])
        kept = [row for row in before if row["name"] not in rows]
        ordered = sorted([*kept, *rows.values()], key=lambda row: row["name"])
        figures = {"counts": counts(ordered), "rows": ordered}
        save(options.file, kind, {"device": _device(), **settings}, figures, options.results)
    print("\n".join(f"{budget:12s} {dict(each)}" for budget, each in counts(list(rows.values())).items()))
    return int(any(run["outcome"] not in HARMLESS for row in rows.values() for run in row["runs"]))


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how often runs ended in each way, by budget."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for run in row["runs"]:
            found.setdefault(run["budget"], Counter())[run["outcome"]] += 1
    return {budget: dict(each) for budget, each in found.items()}


def tried(works: Mapping[Key, Work], limit: int, jobs: int) -> Iterator[tuple[Key, list[dict[str, Any]]]]:
    """Do each work in a process of its own, ``jobs`` at once; yield how its runs ended."""
    # CUDA, which may be in use here, does not work in forks; without it they save each program its imports.
    context: Any = multiprocessing.get_context("spawn" if _cuda() else "fork")
    left = list(works)
    running: dict[Key, tuple[Any, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < jobs:
                key = left.pop(0)
                file = Path(folder) / str(len(left))
                child = context.Process(target=_child, args=(works[key], file, limit))
                child.start()
                running[key] = (child, file, time.monotonic())
            time.sleep(0.02)
            for key, (child, file, start) in list(running.items()):
                if child.is_alive() and time.monotonic() - start > limit + 20:
                    child.kill()  # one that hangs where even its own alarm does not end it
                if not child.is_alive():
                    del running[key]
                    yield key, _ended(child.exitcode, file)


def _child(work: Work, file: Path, limit: int) -> None:
    """Do ``work``; write a line before and after each of its runs, and the stack if it does not end in time."""
    with Path(f"{file}.output").open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        faulthandler.dump_traceback_later(limit, exit=True, file=output)
        if _cuda():
            prepare()

        with file.open("w") as lines:
            for found in work():
                lines.write(json.dumps(asdict(found)) + "\n")
                lines.flush()
        faulthandler.cancel_dump_traceback_later()


def _ended(code: int | None, file: Path) -> list[dict[str, Any]]:
    """Return how the runs of a child ended; one that did not end is the last."""
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if code:
        written = Path(f"{file}.output")
        output = written.read_text(errors="replace") if written.exists() else ""
        ours = [line.strip() for line in output.splitlines() if "/lt_offload/" in line]
        late = "Timeout (" in output or code == -9
        says = f"exit code {code}; {' <- '.join(line.rpartition('/lt_offload/')[2] for line in ours[:4])}"
        after = runs[-1]["budget"] if runs else "nothing"
        runs.append({"budget": f"after {after}", "outcome": "hang" if late else "foreign", "says": says})
    return runs


def prepare() -> None:
    """Load and measure before processes are forked; nothing may be computed here that starts threads of autograd."""
    import torch

    import lt_offload.strategy.offmate  # noqa: F401 - and Lightning with it

    machine_measured_once()
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    gc.collect()
    gc.freeze()


def _show(row: dict[str, Any]) -> None:
    print(
        f"{row['name']!s:>4}",
        " ".join(f"{run['budget']}: {run['outcome']}" for run in row["runs"]),
        row.get("features", ""),
    )
    for says in dict.fromkeys(run["says"] for run in row["runs"] if run["says"]):
        says = says.replace("\n", " ")
        print("       ", says if len(says) < 300 else f"{says[:200]} ... {says[-100:]}")
    if "simplest" in row:
        print("        simplest:", row["simplest"])
    sys.stdout.flush()


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _device() -> str:
    import torch

    if fake_cuda.enabled():
        return "a CUDA device without a GPU (fake)"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the emulated device"
