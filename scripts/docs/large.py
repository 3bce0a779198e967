"""Models that are far larger than a card: by card, the least RAM that is enough, and how fast.

python -m scripts.docs.large [--recipes NAME ...] [--seconds 60]    plans shipped recipes for other cards and RAM

Rows of recipes that are not named stay as they are. Everything is simulated, by the cards' descriptions. A batch goes
through each layer in as many parts as the recipe says, in more where the card is too small for that.
"""

from __future__ import annotations

import sys
from typing import Any

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.verbs.plan import estimate, parts_of, plan
from lt_offload.errors import InfeasibleError
from lt_offload.finetune.terminal import keeping_quiet
from lt_offload.plan import Settings, make_plan
from lt_offload.plan.sweep import reason
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.profile import Profile
from scripts.common import arguments, read_json, save
from scripts.docs.fits import CARDS
from scripts.planning import Stopwatch
from scripts.recipes.headers import title_of

NAME = "large"
MEMORY = dict(zip(CARDS, ("8GB", "12GB", "16GB", "24GB"), strict=True))
RAM = ("32GB", "64GB", "128GB")
PARTS = (4, 16)
"""Parts of a batch that are tried beside the recipe's."""
RECIPES = (
    "gpt-oss-20b-lora-12gb",
    "qwen3-30b-a3b-qlora-8gb",
    "qwen3-30b-a3b-lora-12gb",
    "llama3.3-70b-lora-24gb",
    "olmoe-1b-7b-24gb",
)


def row(name: str, seconds: float) -> dict[str, Any]:
    """Plan recipe ``name`` for every card and return the figures of the least RAM that is enough for it."""
    file = recipes.shipped()[name]
    with keeping_quiet(True):
        app = App(plan, file, recipes.chain(file), [])
        cells = {card: cell(app, card, seconds) for card in CARDS}
    return {"recipe": name, "title": title_of(file.read_text(encoding="utf-8")), "cells": cells}


def cell(app: App, card: str, seconds: float) -> dict[str, Any]:
    """Return the figures of the plan for ``card`` with the least RAM, or the need of the last that was tried."""
    watch, profiles, needed = Stopwatch(), dict[int, Profile](), ""
    first = parts_of(app)
    assert first != "auto"
    for ram in RAM:
        machine = load_hardware(f"{card},ram={ram}")
        settings = Settings(memory=MEMORY[card], host_memory=machine.host_bytes, solver_time_limit=seconds)
        for parts in (first, *(more for more in PARTS if more > first)):
            if parts not in profiles:
                profiles[parts] = estimate(app, load_hardware(card), None, parts)
            try:
                made = make_plan(profiles[parts], settings)
            except InfeasibleError as error:
                needed = reason(error)
                if error.needed_bytes is None:
                    break  # RAM is short however a batch is divided
                continue
            said = made.predicted
            figures = {"tokens_per_s": made.tokens_per_s, "iteration_s": said.iteration_s, "parts": parts, "ram": ram}
            peaks = {"host_peak_bytes": said.host_peak_bytes, "device_peak_bytes": said.device_peak_bytes}
            return figures | peaks | {"no_offload_s": said.no_offload_s, "planner": made.planner} | watch.figures()
    return {"reason": needed, **watch.figures()}


def main() -> None:
    """Plan and save."""
    parser = arguments(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    options = parser.parse_args()
    file = options.results / f"{NAME}.json"
    rows = {one["recipe"]: one for one in read_json(file)["figures"]["rows"]} if file.is_file() else {}
    settings = {"memory": MEMORY, "ram": RAM, "seconds": options.seconds}
    for name in options.recipes:
        rows[name] = row(name, options.seconds)
        print(rows[name], file=sys.stderr)
        save(NAME, NAME, settings, {"rows": [rows[one] for one in RECIPES if one in rows]}, options.results)


if __name__ == "__main__":
    main()
