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

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.attack.children import HARMLESS, compared, options_of, tried
from scripts.common import arguments

if TYPE_CHECKING:
    from scripts.attack.children import Work
    from scripts.attack.programs import Program


def main() -> int:
    """Run the program; returns 1 if something is neither equal nor refused."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 150], metavar="N", help="one, or from and up to")
    parser.add_argument("--simplify", action="store_true", help="look for the features that matter")
    options = options_of(parser, "attack")
    from scripts.attack.programs import Program

    first, end = (options.seeds * 2)[:2] if len(options.seeds) > 1 else (options.seeds[0], options.seeds[0] + 1)
    programs = {seed: Program.of(seed) for seed in range(first, end)}

    def described(seed: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
        row: dict[str, Any] = {"features": programs[seed].features()}
        bad = [run for run in runs if run["outcome"] not in HARMLESS]
        if bad and options.simplify:
            row["simplest"] = simplest(programs[seed], bad[0], options.limit).features()
        return row

    return compared({seed: work(program) for seed, program in programs.items()}, described, options, kind="attack")


def work(program: Program) -> Work:
    """Return what trains ``program`` in all ways."""
    from scripts.attack.compared import attacked
    from scripts.attack.runs import trained

    return partial(attacked, partial(trained, program))


def simplest(program: Program, bad: dict[str, Any], limit: int) -> Program:
    """Return a program with as few features as end like ``bad``."""
    for simpler in program.simpler():
        ((_, runs),) = tried({0: work(simpler)}, limit, 1)
        if any((run["budget"], run["outcome"]) == (bad["budget"], bad["outcome"]) for run in runs):
            return simplest(simpler, bad, limit)
    return program


if __name__ == "__main__":
    sys.exit(main())
