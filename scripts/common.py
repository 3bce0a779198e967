"""What the measuring scripts share: processes with honest memory figures, the machine's description, result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PACKAGES = ("lt-offload", "torch", "lightning", "transformers")

Job = Callable[..., dict[str, Any]]


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    import psutil
    import torch

    from lt_offload.compiling import processor_name

    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def versions(*others: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that matter and of ``others``."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def now() -> dict[str, str]:
    """Return the date and the commit, with ``-dirty`` where the package here differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    dirty = "-dirty" if git("status", "--porcelain", "--", "lt_offload") else ""
    return {"date": date.today().isoformat(), "commit": commit + dirty}


def when(made: Mapping[str, Any]) -> str:
    """Return what :func:`now` said when a result was made."""
    return f"{made['date']} at commit {made['commit']}"


def save(name: str, kind: str, settings: Mapping[str, Any], figures: Mapping[str, Any], folder: Path) -> Path:
    """Write a result file and return its path.

    Args:
        name: stem of the file.
        kind: which table of ``tables.py`` shows it.
        settings: what was run.
        figures: what was measured.
        folder: where to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    result = {
        "kind": kind,
        **now(),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "figures": dict(figures),
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def in_child(module: str, job: str, **arguments: Any) -> dict[str, Any]:
    """Run ``job`` of the program ``module`` in a process, so that peaks and leftovers are its own; return its figures.

    The program must hand its jobs to :func:`serve_child` first thing.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        code = run(child_command(module, job, answer, arguments))
        if code or not answer.is_file():
            raise SystemExit(f"{module}: {job} failed (exit code {code}); its output is above")
        return read_json(answer)


def child_command(module: str, job: str, answer: Path, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command of a process that runs ``job`` of ``module`` and writes its figures to ``answer``."""
    return [sys.executable, "-m", module, "--child", job, str(answer), json.dumps(arguments)]


def serve_child(*jobs: Job) -> None:
    """In a child process, run the job that was asked for and exit; do nothing otherwise."""
    if sys.argv[1:2] != ["--child"]:
        return
    name, answer, arguments = sys.argv[2:5]
    job = {job.__name__: job for job in jobs}[name]
    Path(answer).write_text(json.dumps(job(**json.loads(arguments))), encoding="utf-8")
    sys.stdout.flush()
    raise SystemExit(0)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def run(command: Sequence[str]) -> int:
    """Run a Python process that can import these scripts; what it prints goes to standard error."""
    return subprocess.run(command, stdout=sys.stderr, env=environment()).returncode


def machine_measured_once() -> None:
    """Measure the machine once, and not in every run: how fast it is decides about no number that is compared."""
    from lt_offload.profiling import machine as asked

    machine, contention = asked.measure_hardware, asked.measure_contention
    measured: dict[str, Any] = {}

    def hardware(*args: Any, **options: Any) -> Any:
        if "hardware" not in measured:
            measured["hardware"] = machine(*args, **options)
        return measured["hardware"]

    def slowdowns(*args: Any, **options: Any) -> Any:
        if "contention" not in measured:
            measured["contention"] = contention(*args, **options)
        return measured["contention"]

    asked.measure_hardware, asked.measure_contention = hardware, slowdowns


def environment() -> dict[str, str]:
    """Return the environment of a Python process that can import the package and these scripts."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all scripts take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where to write the JSON file")
    return parser
