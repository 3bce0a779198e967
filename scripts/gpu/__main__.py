"""Everything that needs a GPU, in at most ten minutes: other programs and memory first, equality, races, speed.

    python -m scripts.gpu [--out FOLDER] [--minutes 9.5]        on a machine with a GPU; or: make gpu
    python -m scripts.gpu --parts others races                  some of it
    python -m scripts.gpu --device cpu --tiny                   the same programs on the emulated device, a few of each
    python -m scripts.gpu --device fake --tiny                  and on the fake GPU of the tests

Runs with the interpreter that it is started with; installs nothing. Every part is a process with a time limit of its
own: one that fails or hangs does not keep the next from running, and what it found until then is kept. Tests that
compare bits and measure nothing run beside each other where there are cores for it. gpu.json has
what was found, gpu.log what the parts printed, bench-*.json the figures of the benches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, ROOT, environment, in_child, read_json, save, serve_child
from tests import fake_cuda

GRACE_S = 10.0
"""How long a process may take to end when it is told to."""
SHOWN_LINES = 12
SHOWN_FAILURES = 20
LOG_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process."""

    name: str
    command: Sequence[str]
    minutes: float
    """At most."""
    figures: Path | None = None
    """What it writes on its way: outcomes of tests, and what they measured."""
    beside: bool = False
    """Whether it runs at the same time as others that are marked so: it measures nothing, and bits are the same."""


def describe() -> dict[str, Any]:
    """Return what torch says about the GPU; in a process of its own, so that this one holds no device memory."""
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    free, total = torch.cuda.mem_get_info()
    return {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "device_bytes": total,
        "free_bytes": free,
    }


def parts(options: argparse.Namespace, folder: Path) -> list[Part]:
    """Return what is run, in this order; ``folder`` is for files that nobody keeps."""
    device, tiny = options.device, options.tiny

    def tests(name: str, file: str, minutes: float, *few: str, rows: int = 0, **how: bool) -> Part:
        figures = folder / f"{name}.json"
        command = ["-m", "pytest", f"tests/gpu/{file}", "--device", options.device, "--figures", str(figures)]
        if options.device == "fake" or name == "cards":  # -k chooses here; cards are left out by themselves
            command.append("--full")
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
        command += few if tiny else ["--rows", str(rows)] if rows else []
        return Part(name=name, command=command, minutes=minutes, figures=figures, **how)

    def bench(name: str, minutes: float, *arguments: str) -> Part:
        return Part(name=name, command=["-m", f"scripts.bench.{name}", *arguments], minutes=minutes)

    out = str(options.out)
    launch = ["--tiny"] if tiny else ["--steps", "5", "--rounds", "2"]
    update = ["--tiny"] if tiny else ["--rounds", "3"]
    device = "cuda" if device == "fake" else device  # programs that are no tests do not know the difference
    others = ["--suite", "others", "--device", device, "--out", out, "--minutes", MINUTES_LEFT]
    others += ["--tiny"] if tiny else []
    found = [
        Part(name="others", command=["-m", "scripts.bench.suite", *others], minutes=OTHERS),
        tests("memory", "test_gpu_memory.py", 2.0, "-k", "smallest"),
        tests("parity", "test_gpu_parity.py", BESIDE, "-k", "representative", beside=True),
        tests("settings", "test_gpu_settings.py", BESIDE, "-k", "deterministic and bfloat16", beside=True),
        tests("users", "users", BESIDE, "-k", "the_first_run", rows=20, beside=True),
        tests("loops", "loops", BESIDE, "-k", "test_plain_loops", rows=20, beside=True),
        tests("engine", "engine", BESIDE, "-k", "test_refusals", rows=40, beside=True),
        tests("cards", "several/test_two_cards.py", BESIDE, beside=True),
        tests("races", "races/test_gpu_races.py", BESIDE, "-k", "noticed", beside=True),
        tests("kernels", "test_gpu_kernels.py", BESIDE, beside=True),
        bench("launch", 1.8, "--device", device, "--results", out, *launch),
        bench("update", 0.8, "--results", out, *update),
    ]
    return [part for part in found if part.name in options.parts]


PARTS = (
    *("others", "memory", "parity", "settings", "users", "loops", "engine", "cards", "races", "kernels", "launch"),
    "update",
)

STATUS = {0: "ok", 5: "no test is for this device"}
"""By exit code; pytest's 5 says that none of the tests was chosen."""
OTHERS = 4.0
"""Minutes for the bench beside other programs: a model of 8 billion weights in each of them."""
BESIDE = 3.0
"""Minutes for each of the parts that run at the same time."""
CORES = 2
"""For each of them."""
_PRINTING = threading.Lock()

MINUTES_LEFT = "MINUTES"
"""Stands in a command for the minutes that the part has."""


def run(part: Part, seconds: float, log: Path) -> dict[str, Any]:
    """Run ``part`` for at most ``seconds`` and return how it ended."""
    minutes = f"{max(0.1, (seconds - 2 * GRACE_S) / 60):.2f}"
    command = [sys.executable, *(minutes if word == MINUTES_LEFT else word for word in part.command)]
    print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
    with log.open("ab") as output:
        start_of_output = output.tell()
        output.write(f"\n== {' '.join(command)}\n".encode())
        output.flush()
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    found: dict[str, Any] = {
        "name": part.name,
        "status": "time limit" if code is None else STATUS.get(code, f"exit code {code}"),
        "seconds": round(time.monotonic() - start, 1),
    }
    if part.figures is not None:
        found |= _outcomes(part.figures)
    with _PRINTING:
        _show(found, log, start_of_output)
    return found


def run_all(chosen: Sequence[Part], allowed: Callable[[Part], float], log: Path, folder: Path) -> list[dict[str, Any]]:
    """Run ``chosen`` at the same time, as far as there are cores for it; ``allowed`` says for how many seconds."""

    def one(part: Part) -> dict[str, Any]:
        if (seconds := allowed(part)) < GRACE_S:
            return {"name": part.name, "status": "no time left", "seconds": 0.0}
        return run(part, seconds, folder / f"{part.name}.log")

    with ThreadPoolExecutor(max(1, min(len(chosen), len(os.sched_getaffinity(0)) // CORES))) as pool:
        done = list(pool.map(one, chosen))
    with log.open("ab") as output:
        for part in chosen:
            if (mine := folder / f"{part.name}.log").exists():
                output.write(mine.read_bytes())
    return done


def groups(chosen: Sequence[Part]) -> list[list[Part]]:
    """Return ``chosen`` in order, those together that run beside each other."""
    found: list[list[Part]] = []
    for part in chosen:
        if found and part.beside and found[-1][-1].beside:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            if number == signal.SIGKILL:
                return


def _outcomes(figures: Path) -> dict[str, Any]:
    """Return counts, failures and figures of a part's tests."""
    try:
        written = read_json(figures)
    except (OSError, ValueError):
        return {"passed": 0, "failures": {}, "skipped": {}, "figures": {}}
    skipped, failures = (
        {name: test["message"] for name, test in written["tests"].items() if test["outcome"] == outcome}
        for outcome in ("skipped", "failed")
    )
    return {
        "passed": len(written["tests"]) - len(failures) - len(skipped),
        "failures": failures,
        "skipped": skipped,
        "running": written["running"],
        "figures": written["figures"],
    }


def _show(found: dict[str, Any], log: Path, start_of_output: int) -> None:
    """Print how a part ended, and the end of its output if it did not end well or has no tests."""
    tests = f", {found['passed']} passed, {len(found['failures'])} failed" if "failures" in found else ""
    print(f"   {found['name']}: {found['status']}{tests} ({found['seconds']:.0f} s)")
    for name, message in list(found.get("failures", {}).items())[:SHOWN_FAILURES]:
        print(f"   {name}: {message.strip().splitlines()[-1][:200] if message.strip() else 'no message'}")
    for name, message in found.get("skipped", {}).items():
        print(f"   {name} was not run: {message}")
    if found.get("running"):
        print(f"   ended in {found['running']}")
    if "failures" not in found or (found["status"] != "ok" and not found["failures"]):
        with log.open("rb") as output:
            output.seek(start_of_output)
            lines = output.read().decode(errors="replace").splitlines()
        print("\n".join(f"   {line[:200]}" for line in lines[-SHOWN_LINES:]), flush=True)


def _trim(log: Path) -> None:
    """Keep the end of a log that has become too long."""
    if log.stat().st_size > LOG_BYTES:
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", metavar="FOLDER", help="default: results/gpu")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default 9.5)")
    parser.add_argument("--device", choices=("cuda", "fake", "cpu"), default="cuda", help="cpu is the emulated device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a few tests of each kind: a smoke test of this script")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    deadline = time.monotonic() + 60 * options.minutes - GRACE_S
    if options.device == "fake":
        fake_cuda.enable()
    machine = in_child("scripts.gpu", "describe")
    if options.device != "cpu" and "gpu" not in machine:
        print(f"no GPU: torch {machine['torch']} of {sys.executable} finds none; with --device cpu the same runs on "
              "the emulated device", file=sys.stderr)  # fmt: skip
        return 1
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "gpu.log"
    log.write_bytes(b"")
    settings = {"device": options.device, "minutes": options.minutes, "tiny": options.tiny}
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = parts(options, Path(folder))

        def allowed(part: Part) -> float:
            return min(deadline - time.monotonic() - GRACE_S, 60 * part.minutes)

        for group in groups(chosen):
            done += run_all(group, allowed, log, Path(folder))
            save("gpu", "gpu", settings, {"gpu": machine, "parts": done}, options.out)
    _trim(log)
    print("\n".join(f"{part['name']:14s} {part['status']}" for part in done))
    return 0 if all(part["status"] in STATUS.values() for part in done) else 1


if __name__ == "__main__":
    serve_child(describe)
    raise SystemExit(main())
