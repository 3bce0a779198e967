"""Writes what a change of structure must not alter, or compares what two versions wrote.

    python -m scripts.net write FOLDER                    traces, golden plans, plans of all shipped recipes
    python -m scripts.net write FOLDER --parts traces     some of it: traces, golden, recipes
    python -m scripts.net write FOLDER --recipes NAME ... plans of these recipes only
    python -m scripts.net compare BEFORE AFTER            the first difference of every file; exit with 1 if any

Traces take seconds, golden plans a minute, recipes about half a minute of processor time each; every file is written as
soon as it is there. Nothing depends on the machine's load: no search ends because of the time it took. The
folder belongs to one version of the dependencies, as other versions of the solver may find other plans.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.net import plans, traces
from scripts.net.difference import differences
from scripts.recipes.headers import with_plans

PARTS = ("traces", "golden", "recipes")


def written(parts: Sequence[str], recipes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    if "traces" in parts:
        for name, case in traces.CASES.items():
            yield f"traces/{name}.txt", traces.text(case)
    if "golden" in parts:
        for seed, planner in plans.GOLDEN:
            yield f"golden/{seed}-{planner}.json", plans.golden(seed, planner)
    if "recipes" in parts:
        for name in recipes:
            yield f"recipes/{name}.json", plans.recipe(name)


def write(folder: Path, files: Iterator[tuple[str, str]]) -> None:
    """Write ``files`` below ``folder``, saying what each took."""
    began = time.process_time()
    for name, text in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {time.process_time() - began:.1f} s of processor time", file=sys.stderr)
        began = time.process_time()


def main(args: Sequence[str] | None = None) -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help="write a folder")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    writing.add_argument("--recipes", nargs="+", choices=with_plans(), default=with_plans(), metavar="NAME")
    comparing = verbs.add_parser("compare", help="compare two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(args)
    if options.verb == "write":
        write(options.folder, written(options.parts, options.recipes))
        return 0
    found = list(differences(options.before, options.after))
    print("\n".join(found) if found else "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
