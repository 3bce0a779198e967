"""Does the fake GPU notice faults in what speaks to CUDA? Each of a list is put in, and the tests run on that device.

    python -m scripts.gpu.mutants [--orders lazy random:1] [--only NAME ...] [--jobs N] [--list]

A mutant is caught if a test fails, or if one does not end. Those that pass in one order are tried in the next. In the
end all tests that have noticed a fault are run without one, and must pass. Every mutant is a copy of the tree. What
``--only`` tries again takes its place among the results that are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.common import ROOT, arguments, read_json, save

TASKS, DEVICE = "lt_offload/execute/device/cuda_tasks.py", "lt_offload/execute/device/cuda.py"
BASE = "lt_offload/execute/device/base.py"
STAGING, GUARD = "lt_offload/machine/staging.py", "lt_offload/execute/user_code/guard.py"
TREE = ("lt_offload", "tests", "scripts", "recipes", "configs", "pyproject.toml")
TESTS = ("tests/gpu/test_gpu_parity.py", "tests/gpu/engine", "tests/gpu/loops", "tests/gpu")
"""Those that notice most first."""
LIMIT_S = 400
"""For one test, a hundred times what it takes; beyond, something waits for ever, and the tests end."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: what is written, and what should be."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]


def _one(name: str, file: str, was: str, becomes: str) -> Mutant:
    return Mutant(name, file, ((was, becomes),))


MUTANTS = (
    _one("a wait between streams is dropped", TASKS, "self.cuda_stream.wait_event(task.completion)", "pass"),
    _one(
        "a copy does not wait for what it reads",
        TASKS,
        "            for event in tasks_of((*task.after, *task.behind)):\n                stream.follow(event)",
        "            for event in tasks_of(task.behind):\n                stream.follow(event)",
    ),
    _one(
        "a copy does not wait for who used its target",
        TASKS,
        "            for event in tasks_of((*task.after, *task.behind)):\n                stream.follow(event)",
        "            for event in tasks_of(task.after):\n                stream.follow(event)",
    ),
    _one(
        "an update on the host does not wait for the clipping factor",
        "lt_offload/execute/updates/clipping.py",
        "task.after.append(self.arrived)",
        "pass",
    ),
    Mutant(
        "a copy's event is recorded before it",
        TASKS,
        (
            (
                "            try:\n                work()\n",
                "            stream.complete(task)\n            try:\n                work()\n",
            ),
            (
                "                task.keeps = work\n                stream.complete(task)\n",
                "                task.keeps = work\n",
            ),
        ),
    ),
    _one(
        "a copy is launched to the wrong stream",
        TASKS,
        "        with self._cuda.use(stream.cuda_stream):\n",
        "        with self._cuda.use(self._cuda.current_stream()):\n",
    ),
    _one("memory that a copy uses is not kept", TASKS, "                task.keeps = work\n", ""),
    _one("memory of copies is let go of at once", TASKS, "while tasks and tasks[0].over():", "while tasks:"),
    _one("an update on the host does not wait for its gradient", TASKS, "event.completion.synchronize()", "pass"),
    _one(
        "a stream is taken for ordered after what comes later",
        TASKS,
        "self._after[stream] = task.position",
        "self._after[stream] = task.position + 1000",
    ),
    _one(
        "an event is taken for over",
        TASKS,
        "return self.completion is None or bool(self.completion.query())",
        "return True",
    ),
    _one(
        "a slot is freed without the computations that use it",
        DEVICE,
        "[*after, *buffer.inherited, self.mark()]",
        "[*after, *buffer.inherited]",
    ),
    _one(
        "a slot is freed without the copies that use it",
        DEVICE,
        "[*after, *buffer.inherited, self.mark()]",
        "[self.mark()]",
    ),
    _one(
        "computations do not wait for copies",
        DEVICE,
        "            compute.follow(task)\n",
        "",
    ),
    _one(
        "computations do not wait for who used their target",
        DEVICE,
        "for task in (*tasks, *releases):",
        "for task in (*tasks,):",
    ),
    _one("a copy overwrites a freed slot early", BASE, "after=after, behind=behind, label=", "after=after, label="),
    _one(
        "a copy goes the other way",
        DEVICE,
        "target.copy_(source, non_blocking=True)",
        "source.copy_(target, non_blocking=True)",
    ),
    _one(
        "a mark is on the wrong stream",
        DEVICE,
        "        self._compute_stream().complete(mark)\n",
        '        self._copy_streams["d2h"].complete(mark)\n',
    ),
    _one(
        "a stream is waited for before anything is launched to it",
        DEVICE,
        "tasks_of(before_writing(writes))\n        self._lanes.finish(tasks)\n",
        "tasks_of(before_writing(writes))\n",
    ),
    _one(
        "the new arena may still be filled",
        DEVICE,
        "        self._cuda.current_stream().synchronize()\n        return Arena(",
        "        return Arena(",
    ),
    _one(
        "draining does not wait for copies",
        DEVICE,
        "        for stream in self._copy_streams.values():\n            stream.cuda_stream.synchronize()\n",
        "",
    ),
    _one(
        "who waits on the host does not",
        DEVICE,
        "                task.completion.synchronize()\n",
        "                pass\n",
    ),
    _one("random numbers are not drawn again", BASE, "torch.cuda.set_rng_state(own, gpu)", "pass"),
    _one("another stream of the user's is not ordered", DEVICE, "                stream.follow(end)\n", ""),
    _one("the budget is not hard", DEVICE, "self._cuda.cap(left)", "self._cuda.cap(None)"),
    _one(
        "a staging buffer is filled while it is copied",
        STAGING,
        "                self._copy(goal, part)\n                buffer.free.record(stream)\n",
        "                self._copy(goal, part)\n",
    ),
    _one(
        "a staging buffer is emptied before it is filled",
        STAGING,
        "self._copy(buffer.memory[: piece.numel()], piece)\n                buffer.free.record(stream)\n",
        "self._copy(buffer.memory[: piece.numel()], piece)\n",
    ),
    _one("the guard is one for all threads", GUARD, "class Suspended(threading.local):", "class Suspended:"),
)


def copied(folder: Path, tree: Path = ROOT) -> Path:
    """Copy what git knows of ``tree`` into ``folder`` and return it."""
    known = subprocess.run(["git", "ls-files", "-z", *TREE], cwd=tree, capture_output=True, text=True, check=True)
    for name in filter(None, known.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, folder / name)
    return folder


def put_in(mutant: Mutant, folder: Path) -> None:
    """Make the fault in a copy of the tree."""
    file = folder / mutant.file
    text = file.read_text(encoding="utf-8")
    for was, becomes in mutant.changes:
        assert text.count(was) == 1, f"{mutant.name}: {mutant.file} has {was!r} {text.count(was)} times"
        text = text.replace(was, becomes)
    file.write_text(text, encoding="utf-8")


def failure(folder: Path, order: str, tests: Sequence[str] = TESTS) -> str:
    """Run ``tests`` in ``folder`` until one fails; return how, empty if all pass."""
    command = [sys.executable, "-m", "pytest", *tests, "--device", "fake", "--order", order, "-x", "-q", "--tb=line"]
    command += ["-p", "no:cacheprovider", "--show-capture=no", "-o", "addopts="]
    command += ["-o", f"faulthandler_timeout={LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0]
    if "Timeout (" in done.stderr:
        return "no end"
    return f"exit code {done.returncode}: {done.stdout.strip()[-300:]}"


def tried(mutant: Mutant, orders: list[str]) -> dict[str, Any]:
    """Return what became of a mutant."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = copied(Path(name))
        put_in(mutant, folder)
        how = order = ""
        for order in orders:
            how = failure(folder, order)
            if how:
                break
    return {
        "name": mutant.name,
        "caught": bool(how),
        "order": order if how else None,
        "by": how,
        "seconds": round(time.monotonic() - start),
    }


def main() -> int:
    """Try all mutants, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--orders", nargs="+", default=["lazy", "random:1"], metavar="ORDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="so many at a time")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    found = []
    with ThreadPoolExecutor(options.jobs) as pool:  # each waits for a process
        for one in pool.map(partial(tried, orders=options.orders), chosen):
            found.append(one)
            print(f"{one['name']:60s} {one['order'] or 'NOT CAUGHT':12s} {one['by'][:100]}", flush=True)
    for order in options.orders:
        said = [one["by"].partition(" - ")[0] for one in found if one["order"] == order]
        noticed = {line.partition(" ")[2] for line in said if "::" in line}
        with tempfile.TemporaryDirectory() as name:
            how = failure(copied(Path(name)), order, sorted(noticed)) if noticed else ""
        if how:
            print(f"a test fails without a fault, in {order} order: {how}", file=sys.stderr)
            return 1
    print(f"{sum(one['caught'] for one in found)} of {len(found)} caught")
    known = options.results / "gpu-mutants.json"
    before = read_json(known)["figures"]["mutants"] if options.only and known.exists() else []
    results = {one["name"]: one for one in (*before, *found)}
    if results.keys() == {mutant.name for mutant in MUTANTS}:
        settings = {"orders": options.orders, "tests": list(TESTS)}
        found = [results[mutant.name] for mutant in MUTANTS]
        caught = sum(one["caught"] for one in found)
        print(save("gpu-mutants", "gpu-mutants", settings, {"caught": caught, "mutants": found}, options.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
