"""Do the tests of `make test` notice faults outside of CUDA? Each of a list is put in, and a few files of tests run.

    python -m scripts.mutants [--only NAME ...] [--file NAME] [--tree FOLDER] [--list]

A mutant is caught if a test of the sample that `make test` takes fails, or if one does not end. Which files may notice
it is said with it, so that a mutant takes seconds. They are put into a copy of the tree, one after another, and tests
run in a process that is forked from this one, which has loaded torch and Lightning. What ``--only`` tries again takes
its place among the results that are there. Faults in what speaks to CUDA: ``scripts.gpu.mutants``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts.common import ROOT, arguments, read_json, save
from scripts.gpu.mutants import copied, put_in
from scripts.mutants.faults import MUTANTS
from scripts.mutants.mutant import Mutant

LIMIT_S = 120
"""For one test; beyond, something waits for ever, and the tests end."""
LOADED = ("torch", "lightning.pytorch", "transformers.models.llama.modeling_llama", "numpy")


class _Sample:
    """Leaves of the tests those that ``make test`` runs: what a folder gets of the slow ones depends on all in it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        sys.modules["tests.sampling"].__dict__["EVERY_ROW"] = False
        items[:] = [item for item in items if item.nodeid in self._names]


def sampled(folder: Path) -> set[str]:
    """Return the tests of ``folder`` that ``make test`` runs."""
    _, lines = _run(folder, ["--collect-only", "-q", "tests"])
    return {line for line in lines if "::" in line}


def failure(folder: Path, tests: Sequence[str], sample: Collection[str]) -> str:
    """Run those of ``tests`` that are in ``sample`` until one fails; return how, empty if all pass."""
    options = ["-x", "-q", "--tb=line", "--show-capture=no", "--every-row", "-o", f"faulthandler_timeout={LIMIT_S}"]
    options += ["-o", "faulthandler_exit_on_timeout=true", *(f"tests/{name}" for name in tests)]
    status, lines = _run(folder, options, [_Sample(sample)])
    if not status:
        return ""
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].partition(" - ")[0]
    if any("Timeout (" in line for line in lines):
        return "no end"
    raise RuntimeError(f"tests did not run, status {status}: {' '.join(lines)[-1000:]}")


def _run(folder: Path, options: Sequence[str], plugins: Sequence[object] = ()) -> tuple[int, list[str]]:
    """Run pytest in a fork of this process; return its status and what it has written."""
    output = folder / "output.txt"
    child = os.fork()
    if not child:
        _become(folder, output, [*options, "-p", "no:cacheprovider"], plugins)
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
    os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
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


def tried(mutant: Mutant, folder: Path, sample: Collection[str]) -> dict[str, Any]:
    """Return what became of a mutant in ``folder``, a copy of a tree, which is as before afterwards."""
    start, file = time.monotonic(), folder / mutant.fault.file
    text = file.read_text(encoding="utf-8")
    put_in(mutant.fault, folder)
    try:
        how = failure(folder, mutant.tests, sample)
    finally:
        file.write_text(text, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
    return {"name": mutant.name, "file": mutant.file, "by": how, "seconds": round(time.monotonic() - start)}


def main() -> int:
    """Try all mutants, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one of these")
    parser.add_argument("--file", default="mutants", metavar="NAME", help="of the results")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="whose package and tests are tried")
    parser.add_argument("--missing", action="store_true", help="only those of which there is no result")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    for name in LOADED:
        import_module(name)
    known = options.results / f"{options.file}.json"
    found = {one["name"]: one for one in read_json(known)["figures"]["mutants"]} if known.exists() else {}
    chosen = [mutant for mutant in chosen if not (options.missing and mutant.name in found)]
    rows, caught = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = copied(Path(name), options.tree)
        sample = sampled(folder)
        for mutant in chosen:
            one = found[mutant.name] = tried(mutant, folder, sample)
            print(f"{mutant.name:70s} {one['by'] or 'NOT CAUGHT'} ({one['seconds']} s)", flush=True)
            rows = [found[mutant.name] for mutant in MUTANTS if mutant.name in found]
            caught = sum(bool(row["by"]) for row in rows)
            save(options.file, "mutants", {}, {"caught": caught, "mutants": rows}, options.results)
    print(f"{caught} of {len(rows)} caught: {known}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
