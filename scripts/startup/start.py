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


def started(recipe: str, settings: list[str], profile: str | None) -> dict[str, Any]:
    """Run the recipe up to the end of its first step and return the seconds until it begins, and until its end."""
    import cProfile

    marks: dict[str, float] = {}
    profiler = cProfile.Profile() if profile else None
    begun = time.perf_counter()
    if profiler:
        profiler.enable()
    from lt_offload.finetune.summary import RunSummary

    from lt_offload.cli.main import main

    class Marks(RunSummary):
        """Notes when the first step begins and ends, and when the model is there."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            marks.setdefault("setup_s", time.perf_counter() - begun)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            marks.setdefault("loaded_s", time.perf_counter() - begun)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            marks.setdefault("first_step_s", time.perf_counter() - begun)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            marks.setdefault("after_first_step_s", time.perf_counter() - begun)
            super().on_train_batch_end(*args, **kwargs)

    import lt_offload.cli.app as app

    app.RunSummary = Marks  # type: ignore[misc]
    code = main([recipe, *settings])
    if profiler and profile:
        profiler.disable()
        profiler.dump_stats(profile)
    if code:
        raise SystemExit(f"{recipe} ended with exit code {code}")
    return marks


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
        flags = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"]
        flags += [
            "--trainer.enable_checkpointing",
            "false",
            "--trainer.callbacks",
            "null",
            "--data.sample_prompt",
            "null",
        ]
        for number in range(options.rounds):
            folder = str(Path(scratch) / str(number))
            least.append(in_child(PROGRAM, "needed", recipe=options.recipe))
            settings = [*flags, "--trainer.default_root_dir", folder, *others]
            runs.append(in_child(PROGRAM, "started", recipe=options.recipe, settings=settings, profile=None))
        if options.profile:
            stats = str(Path(scratch) / "stats")
            settings = [*flags, "--trainer.default_root_dir", str(Path(scratch) / "profiled"), *others]
            in_child(PROGRAM, "started", recipe=options.recipe, settings=settings, profile=stats)
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
