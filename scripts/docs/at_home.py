"""The models that are asked for most, on a card of 12 GB with 32 GB of RAM: yes or no, by which method, how fast.

python -m scripts.docs.at_home [--models NAME ...]    plans each as 'lt-finetune new NAME' does; half a minute each

Rows of models that are not named stay as they are. Everything is simulated, by the card's description.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from lt_offload.cli.models import named
from lt_offload.cli.verbs.ways import BATCH, Drafts, Machine, WayToTrain
from lt_offload.errors import OffloadError
from lt_offload.finetune.terminal import keeping_quiet
from lt_offload.profiling.hardware import load_hardware
from scripts.common import arguments, read_json, save
from scripts.planning import Stopwatch

NAME = "at-home"
HARDWARE, MEMORY = "rtx-3060,ram=32GB", "12GB"
MODELS = (
    "google/gemma-3-1b-it",
    "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen3-1.7B",
    "HuggingFaceTB/SmolLM3-3B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "microsoft/Phi-4-mini-instruct",
    "Qwen/Qwen3-4B",
    "mistralai/Mistral-7B-v0.3",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-8B",
    "mistralai/Mistral-Nemo-Base-2407",
    "Qwen/Qwen3-14B",
)
"""By their size."""


def row(name: str) -> dict[str, Any]:
    """Plan ``name`` in every way and return the figures of each, and which one is chosen."""
    watch, machine = Stopwatch(), Machine(load_hardware(HARDWARE), HARDWARE, MEMORY, None)
    with tempfile.TemporaryDirectory() as folder, keeping_quiet(True):
        drafts = Drafts(named(name), machine, None, Path(folder))
        try:
            drafts.ways("auto")
            ways, chosen = drafts.choose(drafts.improved())
        except OffloadError as error:
            return {"model": name, "ways": [], "reason": str(error), **watch.figures()}
    made = [figures(chosen if way.method == chosen.method else way) for way in ways]
    return {"model": name, "ways": made, "chosen": chosen.method.title, "length": chosen.length, **watch.figures()}


def figures(way: WayToTrain) -> dict[str, Any]:
    """Return what a table shows of ``way``."""
    shown: dict[str, Any] = {"way": way.method.title, "reason": way.why}
    if way.plan is not None:
        predicted = way.plan.predicted
        shown |= {"tokens_per_s": way.tokens_per_s, "iteration_s": predicted.iteration_s}
        shown |= {"no_offload_s": predicted.no_offload_s, "host_peak_bytes": predicted.host_peak_bytes}
    return shown


def main() -> None:
    """Plan and save."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    file = options.results / f"{NAME}.json"
    rows = {one["model"]: one for one in read_json(file)["figures"]["rows"]} if file.is_file() else {}
    settings = {"hardware": HARDWARE, "memory": MEMORY, "batch": BATCH}
    for name in options.models:
        rows[name] = row(name)
        print(rows[name], file=sys.stderr)
        save(NAME, NAME, settings, {"rows": [rows[one] for one in MODELS if one in rows]}, options.results)


if __name__ == "__main__":
    main()
