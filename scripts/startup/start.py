"""From start to first step of a recipe against what it cannot do without; goal: at most 1.3 times that.

    python -m scripts.startup.start [RECIPE] [--rounds 3] [--profile]

What it cannot do without is measured by a process of its own: importing torch, transformers and Lightning, and loading
the model. Processes take turns, and the shortest of each kind counts. ``--profile`` prints where the time of the
recipe's process goes, by function.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.common import arguments, in_child, save, serve_child

PROGRAM = "scripts.startup.start"
GOAL = 1.3


def needed(recipe: str) -> dict[str, Any]:
    """Import what everybody needs and load the recipe's model; return the seconds of either."""
    begun = time.perf_counter()
    import lightning.pytorch
    import torch
    import transformers

    assert all((torch, transformers.AutoModelForCausalLM, lightning.pytorch.Trainer))
    imported = time.perf_counter()
    from lt_offload.cli import recipes
    from lt_offload.finetune.load import load_model

    settings: dict[str, Any] = {}
    for file in recipes.chain(recipes.find(recipe)):
        settings |= recipes.read(file).get("model", {})
    ready = time.perf_counter()
    load_model(settings["name"], dtype=settings.get("dtype", "float32"))
    return {"imports_s": imported - begun, "load_s": time.perf_counter() - ready}


def started(settings: list[str], profile: str | None) -> dict[str, Any]:
    """Run ``lt-finetune`` with ``settings``; return the seconds until the first step begins, and until its end."""
    import cProfile

    profiler = cProfile.Profile() if profile else None
    begun = time.perf_counter()
    if profiler:
        profiler.enable()
    from lt_offload.cli.main import main

    code = main(settings)
    if profiler and profile:
        profiler.disable()
        profiler.dump_stats(profile)
    if code:
        raise SystemExit(f"{settings[0]} ended with exit code {code}")
    from scripts.startup.marks import MARKS

    return {name: mark - begun for name, mark in MARKS.items()}


def main() -> None:
    """Measure in turns and write the result."""
    serve_child(needed, started)
    parser = arguments(__doc__)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    options, others = parser.parse_known_args()
    least: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [
            *("--trainer.max_steps", "1"),
            *("--trainer.limit_val_batches", "0"),
            *("--trainer.num_sanity_val_steps", "0"),
            *("--trainer.enable_checkpointing", "false"),
            *("--trainer.callbacks", "null"),
            *("--trainer.callbacks", '[{"class_path": "scripts.startup.marks.Marks"}]'),
            *("--data.sample_prompt", "null"),
        ]
        for number in range(options.rounds):
            folder = str(Path(scratch) / str(number))
            least.append(in_child(PROGRAM, "needed", recipe=options.recipe))
            settings = [options.recipe, *flags, "--trainer.default_root_dir", folder, *others]
            runs.append(in_child(PROGRAM, "started", settings=settings, profile=None))
        if options.profile:
            stats = str(Path(scratch) / "stats")
            folder = str(Path(scratch) / "profiled")
            settings = [options.recipe, *flags, "--trainer.default_root_dir", folder, *others]
            in_child(PROGRAM, "started", settings=settings, profile=stats)
            _print(stats)
    base = min(one["imports_s"] + one["load_s"] for one in least)
    first = min(one["first_step_s"] for one in runs)
    figures = {
        "needed": least,
        "runs": runs,
        "needed_s": base,
        "first_step_s": first,
        "ratio": first / base,
        "goal": GOAL,
    }
    print(f"first step after {first:.1f} s, {first / base:.2f} times the {base:.1f} s of imports and loading")
    settings_of_run = {"recipe": options.recipe, "rounds": options.rounds}
    print(save(f"bench-start-{Path(options.recipe).stem}", "bench-start", settings_of_run, figures, options.results))


def _print(stats: str) -> None:
    import pstats

    pstats.Stats(stats, stream=sys.stdout).sort_stats("cumulative").print_stats(
        "lt_offload|lightning/pytorch/trainer", 60
    )


if __name__ == "__main__":
    main()
