"""Plans the shipped recipes on the machines that their headers name, and writes what the plans say into the headers.

python -m scripts.recipes.headers                     all recipes
python -m scripts.recipes.headers llama2-7b-12gb ...  some of them; the figures of the others stay
python -m scripts.recipes.headers --check             exit with 1 if headers are not what results/recipes.json says

A busy machine needs more ``--seconds``; figures do not depend on its load otherwise.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lt_offload.cli import recipes
from lt_offload.cli.main import main as lt_finetune
from lt_offload.cli.verbs.new import RAM, header
from lt_offload.cli.verbs.new import figures as shown_of
from lt_offload.schema.plan import Plan
from scripts.common import RESULTS, now, read_json, save, when
from scripts.planning import Stopwatch, figures_of

NAME = "recipes"
SECONDS = 60.0
"""What a plan may take: twice what it has where a recipe says nothing, so that a busy machine finds it, too."""

Figure = dict[str, Any]
_HARDWARE = re.compile(r"^#   lt-finetune plan \S+ --hardware (\S+)", re.MULTILINE)


def lines_of(text: str) -> list[str]:
    """Return the comment at the top of a recipe with this ``text``."""
    lines = text.splitlines()
    return lines[: next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))]


def title_of(text: str) -> str:
    """Return what the first line of a recipe with this ``text`` says it trains, without the RAM."""
    return RAM.sub("", lines_of(text)[0].removeprefix("#").strip())


def hardware_of(text: str) -> str | None:
    """Return the machine that the comment at the top of a recipe names, None if it names none."""
    found = _HARDWARE.search(text)
    return found[1] if found else None


def with_header(text: str, lines: Sequence[str]) -> str:
    """Return a recipe's ``text`` with other ``lines`` at its top."""
    return "\n".join([*lines, *text.splitlines()[len(lines_of(text)) :]]) + "\n"


def plan_of(name: str, seconds: float) -> Plan | None:
    """Return the plan of recipe ``name`` on the machine that its header names; None if there is none."""
    hardware = hardware_of(recipes.shipped()[name].read_text(encoding="utf-8"))
    assert hardware is not None, name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        flags = ["--hardware", hardware, "--save", str(file), "--trainer.strategy.solver_time_limit", str(seconds)]
        return None if lt_finetune(["plan", name, *flags]) else Plan.load(file)


def planned(name: str, seconds: float) -> Figure | None:
    """Return what the plan of recipe ``name`` says, on the machine that its header names; None if there is none."""
    text = recipes.shipped()[name].read_text(encoding="utf-8")
    hardware, watch = hardware_of(text), Stopwatch()
    plan = plan_of(name, seconds)
    if plan is None:
        return None
    what = {"title": title_of(text), "hardware": hardware}
    return what | figures_of(plan) | shown_of(plan) | watch.figures() | now()


def text_of(name: str, figure: Figure) -> str:
    """Return the text of recipe ``name`` with ``figure`` in its header."""
    text = recipes.shipped()[name].read_text(encoding="utf-8")
    return with_header(text, header(title_of(text), name, hardware_of(text), figure, made=when(figure)))


def with_plans() -> list[str]:
    """Return the recipes for cards of one size: all but the quickstart, which runs anywhere."""
    return [name for name, path in recipes.shipped().items() if recipes.gigabytes(path)]


def wrong(figures: dict[str, Figure]) -> list[str]:
    """Return the recipes whose header is not what ``figures`` say."""
    texts = {name: recipes.shipped()[name].read_text(encoding="utf-8") for name in with_plans()}
    return [name for name, text in texts.items() if name not in figures or text_of(name, figures[name]) != text]


def main(args: Sequence[str] | None = None) -> int:
    """Plan, save and rewrite; or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of recipes; default: all")
    parser.add_argument("--check", action="store_true", help="plan nothing; say which headers are not up to date")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time limit of a plan (default {SECONDS:g})")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the JSON file is")
    options = parser.parse_args(args)
    file = options.results / f"{NAME}.json"
    figures: dict[str, Figure] = read_json(file)["figures"] if file.is_file() else {}
    if options.check:
        for name in (outdated := wrong(figures)):
            print(f"{recipes.shipped()[name]}: not what {file} says; run python -m scripts.recipes.headers {name}")
        return 1 if outdated else 0
    failed = []
    for name in options.recipes or with_plans():
        found = planned(name, options.seconds)
        if found is None:
            failed.append(name)
            continue
        figures[name] = found
        recipes.shipped()[name].write_text(text_of(name, figures[name]), encoding="utf-8")
        known = {name: figures[name] for name in with_plans() if name in figures}
        print(save(NAME, NAME, {"seconds": options.seconds}, known, options.results), name, file=sys.stderr)
    if failed:
        print(f"no plan, for reasons above: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
