"""Do the tests notice faults? Each of a list is put into a copy of the tree, one after another, and tests run.

    python -m scripts.mutants [--only NAME ...] [--missing] [--tree FOLDER] [--list]
    python -m scripts.mutants --cuda [--orders lazy random:1]     those in what speaks to CUDA, on the fake GPU

A mutant is caught if a test fails, or if one does not end. Of the first kind, a few files of tests are said with it, so
that it takes seconds: of those the sample that ``make test`` takes, in a process that is forked from this one, which
has loaded torch and Lightning. For the second, all of tests/gpu runs until one fails, in one order after the other. In
the end all tests that have noticed a fault are run without one, and must pass. What ``--only`` tries again takes its
place among the results that are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts.common import ROOT, arguments, read_json, save
from scripts.mutants import cuda, faults
from scripts.mutants.mutant import Mutant

LIMIT_S = 120
"""For one test; beyond, something waits for ever, and the tests end. Three times as much on the fake GPU."""
LOADED = ("torch", "lightning.pytorch", "transformers.models.llama.modeling_llama", "numpy")
TREE = ("lt_offload", "tests", "scripts", "recipes", "configs", "pyproject.toml")
ON_THE_FAKE_GPU = ("gpu/test_gpu_parity.py", "gpu/engine", "gpu/loops", "gpu")
"""Those that notice most first."""
QUIETLY = ("-x", "-q", "--tb=line", "--show-capture=no", "-p", "no:cacheprovider")

Failure = Callable[[Sequence[str]], str]
"""Runs tests until one fails, and returns how; empty if all pass."""


class _Sample:
    """Leaves of the tests those that ``make test`` runs: what a folder gets of the slow ones depends on all in it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        sys.modules["tests.sampling"].__dict__["EVERY_ROW"] = False
        items[:] = [item for item in items if item.nodeid in self._names]


class Forked:
    """Runs the sample of tests in forks of this process."""

    def __init__(self, folder: Path) -> None:
        for name in LOADED:
            import_module(name)
        self._folder = folder
        _, lines = self._run(["--collect-only", "-q", "tests"])
        self._sample = {line for line in lines if "::" in line}

    def __call__(self, tests: Sequence[str]) -> str:
        """Run those of ``tests`` that are in the sample."""
        options = [*QUIETLY, "--every-row", *_limited(LIMIT_S), *(f"tests/{name}" for name in tests)]
        return _said(*self._run(options, [_Sample(self._sample)]))

    def _run(self, options: Sequence[str], plugins: Sequence[object] = ()) -> tuple[int, list[str]]:
        """Run pytest in a fork of this process; return its status and what it has written."""
        output = self._folder / "output.txt"
        child = os.fork()
        if not child:
            _become(self._folder, output, [*options, "-p", "no:cacheprovider"], plugins)
        _, status = os.waitpid(child, 0)
        return status, output.read_text(encoding="utf-8", errors="replace").splitlines()


def _become(folder: Path, output: Path, options: list[str], plugins: Sequence[object]) -> None:
    """Be pytest, and end."""
    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("lt_offload", "scripts", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    os.environ |= _environment(folder)
    code = 1
    try:
        # The warning is about what this process has loaded already.
        code = int(pytest.main([*options, "-W", "ignore::pytest.PytestAssertRewriteWarning"], list(plugins)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def on_the_fake_gpu(folder: Path, orders: Sequence[str]) -> Failure:
    """Return what runs tests on the fake GPU, in one order after the other; it has to be there when torch is loaded."""

    def failure(tests: Sequence[str]) -> str:
        for order in orders:
            command = [sys.executable, "-m", "pytest", *(f"tests/{name}" for name in tests), *QUIETLY, "-o", "addopts="]
            command += ["--device", "fake", "--order", order, *_limited(3 * LIMIT_S)]
            environment = os.environ | _environment(folder)
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if how := _said(done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]):
                return how
        return ""

    return failure


def _limited(seconds: float) -> list[str]:
    return ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true"]


def _environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def _said(status: int, lines: Sequence[str]) -> str:
    """Return how tests failed, from what they wrote."""
    if not status:
        return ""
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].partition(" - ")[0]
    if any("Timeout (" in line for line in lines):
        return "no end"
    raise RuntimeError(f"tests did not run, status {status}: {' '.join(lines)[-1000:]}")


def copied(folder: Path, tree: Path) -> Path:
    """Copy what git knows of ``tree`` into ``folder`` and return it."""
    known = subprocess.run(["git", "ls-files", "-z", *TREE], cwd=tree, capture_output=True, text=True, check=True)
    for name in filter(None, known.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, folder / name)
    return folder


def tried(mutant: Mutant, folder: Path, failure: Failure) -> dict[str, Any]:
    """Return what became of a mutant in ``folder``, a copy of a tree, which is as before afterwards."""
    start, file = time.monotonic(), folder / mutant.file
    text = file.read_text(encoding="utf-8")
    mutant.put_in(folder)
    try:
        how = failure(mutant.tests or ON_THE_FAKE_GPU)
    finally:
        file.write_text(text, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()  # it may be as old and as large as the next one
    return {"name": mutant.name, "file": mutant.file, "by": how, "seconds": round(time.monotonic() - start)}


def main() -> int:
    """Try all mutants, print and save; return 1 if a test fails without a fault."""
    parser = arguments(__doc__)
    parser.add_argument("--cuda", action="store_true", help="faults in what speaks to CUDA")
    parser.add_argument("--orders", nargs="+", default=["lazy", "random:1"], metavar="ORDER", help="with --cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one of these")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="whose package and tests are tried")
    parser.add_argument("--missing", action="store_true", help="only those of which there is no result")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    mutants = cuda.MUTANTS if options.cuda else faults.MUTANTS
    chosen = [m for m in mutants if not options.only or any(part in m.name for part in options.only)]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    kind = "gpu-mutants" if options.cuda else "mutants"
    known = options.results / f"{kind}.json"
    rows = {one["name"]: one for one in read_json(known)["figures"]["mutants"]} if known.exists() else {}
    chosen = [mutant for mutant in chosen if not (options.missing and mutant.name in rows)]
    noticed = set()
    with tempfile.TemporaryDirectory() as name:
        folder = copied(Path(name), options.tree)
        failure = on_the_fake_gpu(folder, options.orders) if options.cuda else Forked(folder)
        for mutant in chosen:
            one = rows[mutant.name] = tried(mutant, folder, failure)
            print(f"{mutant.name:70s} {one['by'] or 'NOT CAUGHT'} ({one['seconds']} s)", flush=True)
            noticed |= {one["by"].partition(" tests/")[2]} - {""}
            ordered = [rows[mutant.name] for mutant in mutants if mutant.name in rows]
            caught = sum(bool(row["by"]) for row in ordered)
            settings = {"orders": options.orders} if options.cuda else {}
            save(kind, kind, settings, {"caught": caught, "mutants": ordered}, options.results)
        if noticed and (how := failure(sorted(noticed))):
            print(f"a test fails without a fault: {how}", file=sys.stderr)
            return 1
    print(f"{sum(bool(row['by']) for row in rows.values())} of {len(rows)} caught: {known}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
