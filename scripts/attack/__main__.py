"""Trains programs of users' kind, drawn by seeds, plainly and within budgets, and compares everything bit for bit.

    python -m scripts.attack                    150 programs on the emulated device (or on a GPU if there is one)
    python -m scripts.attack --seeds 40 60      those from 40 up to 60
    python -m scripts.attack --device fake      on the fake GPU of the tests
    python -m scripts.attack --seeds 40 --simplify    one program, and the simplest that ends as it does

A program runs in a process of its own, with four budgets: the smallest that is named, a middle one, one in which all
stays, and the smallest without activations that travel. Each ends as equal, refused (by an error of ours, whose
sentence is kept), over budget (in a memory that was named as enough), wrong, foreign (another error) or hang. Returns 1
if anything is neither equal nor refused.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import arguments, machine_measured_once, save
from tests import fake_cuda

if TYPE_CHECKING:
    from scripts.attack.programs import Program

HARMLESS = ("equal", "refused", "not run")


def main(given: Sequence[str] | None = None) -> int:
    """Run the program; returns 1 if something is neither equal nor refused."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 150], metavar="N", help="one, or from and up to")
    parser.add_argument("--device", choices=("fake",), help="without it a GPU, or else the emulated device")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs at once (default 1)")
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS", help="of a program (default 300)")
    parser.add_argument("--simplify", action="store_true", help="look for the features that matter")
    parser.add_argument("--file", default="attack", metavar="NAME", help="of the results")
    options = parser.parse_args(given)
    if options.device == "fake":
        fake_cuda.enable()
    from scripts.attack.programs import Program

    _prepare()
    first, end = (options.seeds * 2)[:2] if len(options.seeds) > 1 else (options.seeds[0], options.seeds[0] + 1)
    programs = {seed: Program.of(seed) for seed in range(first, end)}
    rows: list[dict[str, Any]] = []
    for seed, runs in tried(programs, options.limit, options.jobs):
        row: dict[str, Any] = {"seed": seed, "features": programs[seed].features(), "runs": runs}
        bad = [run for run in runs if run["outcome"] not in HARMLESS]
        if bad and options.simplify:
            row["simplest"] = simplest(programs[seed], bad[0], options.limit).features()
        rows = sorted([*rows, row], key=lambda row: int(row["seed"]))
        _show(row)
        settings = {"device": _device(), "seeds": [first, end]}
        save(options.file, "attack", settings, {"counts": counts(rows), "programs": rows}, options.results)
    print("\n".join(f"{budget:12s} {dict(each)}" for budget, each in counts(rows).items()))
    return int(any(run["outcome"] not in HARMLESS for row in rows for run in row["runs"]))


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how often runs ended in each way, by budget."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for run in row["runs"]:
            found.setdefault(run["budget"], Counter())[run["outcome"]] += 1
    return {budget: dict(each) for budget, each in found.items()}


def tried(programs: dict[int, Program], limit: int, jobs: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Run programs in processes of their own, ``jobs`` at once; yield how their runs ended."""
    # CUDA, which may be in use here, does not work in forks; without it they save each program its imports.
    context: Any = multiprocessing.get_context("spawn" if _cuda() else "fork")
    # By the name that a spawned process can import, which "__main__" is not.
    child_of, left = import_module("scripts.attack.__main__")._child, list(programs)
    running: dict[int, tuple[Any, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < jobs:
                seed = left.pop(0)
                file = Path(folder) / str(seed)
                child = context.Process(target=child_of, args=(programs[seed], file, limit))
                child.start()
                running[seed] = (child, file, time.monotonic())
            time.sleep(0.02)
            for seed, (child, file, start) in list(running.items()):
                if child.is_alive() and time.monotonic() - start > limit + 20:
                    child.kill()  # one that hangs where even its own alarm does not end it
                if not child.is_alive():
                    del running[seed]
                    yield seed, _ended(child.exitcode, file)


def _child(program: Program, file: Path, limit: int) -> None:
    """Run ``program``; write a line before and after each of its runs, and the stack if it does not end in time."""
    with Path(f"{file}.output").open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        faulthandler.dump_traceback_later(limit, exit=True, file=output)
        if _cuda():
            _prepare()
        from scripts.attack.runs import attacked

        with file.open("w") as lines:
            for found in attacked(program):
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


def simplest(program: Program, bad: dict[str, Any], limit: int) -> Program:
    """Return a program with as few features as end like ``bad``."""
    for simpler in program.simpler():
        ((_, runs),) = tried({0: simpler}, limit, 1)
        if any((run["budget"], run["outcome"]) == (bad["budget"], bad["outcome"]) for run in runs):
            return simplest(simpler, bad, limit)
    return program


def _prepare() -> None:
    """Load and measure before processes are forked; nothing may be computed here that starts threads of autograd."""
    import torch

    import scripts.attack.runs  # noqa: F401 - and Lightning with it

    machine_measured_once()
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    gc.collect()
    gc.freeze()


def _show(row: dict[str, Any]) -> None:
    print(f"{row['seed']:4d}", " ".join(f"{run['budget']}: {run['outcome']}" for run in row["runs"]), row["features"])
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


if __name__ == "__main__":
    sys.exit(main())
